-- Admission: decides over all charges of one request, then charges all or none.
-- Operation: ADMIT, number of the set, lease id, its life in microseconds, mode, amounts by measure.
-- Answer: outcome, index of the binding charge (from 0; -1 = none), wait (NEVER = waiting does not
-- help), then two numbers per charge: what is used and its rest (rates) or the microseconds until
-- the window ends. UNSEEDED: the two are the window of each budget, start and end.
local NORMAL, RESTORE, PEEK = 0, 1, 2
-- Where an operation has its amounts: COSTS + measure.
local COSTS = 5

-- Whether a budget that is not here may have been lost rather than never used: its window began
-- before this tenant's data did.
local function is_lost(charge, from)
  if is_kept(record_of(charge.key), charge.at, from) then
    return false
  end
  local since = call('GET', since_key)
  return not since or charge.kind == TOTAL or from < tonumber(since)
end

local function unseeded(charges)
  local is_any = false
  for _, charge in ipairs(charges) do
    if charge.kind >= DAY then
      is_any = is_any or is_lost(charge, window_of(charge.kind, now))
    end
  end
  if not is_any then
    return nil
  end
  local reply = {UNSEEDED, -1, 0}
  for _, charge in ipairs(charges) do
    local from, to = 0, 0
    if charge.kind >= DAY and charge.kind ~= TOTAL then
      from, to = window_of(charge.kind, now)
    end
    reply[#reply + 1] = from
    reply[#reply + 1] = to
  end
  return reply
end

local function slots_wait(charge)
  if not are_slots_full(charge.key, charge.limit) then
    return 0
  end
  local first = call('ZRANGE', charge.key, 0, 0, 'WITHSCORES')
  return first[2] and min(POLL_US, tonumber(first[2]) - now) or POLL_US
end

local function budget_wait(charge, cost)
  local record, at, limit = record_of(charge.key), charge.at, charge.limit
  local from, to = window_of(charge.kind, now)
  local spent, held = 0, 0
  if is_kept(record, at, from) then
    spent, held = record[at], record[at + 1]
  end
  if spent + held + cost <= limit then
    return 0
  end
  if spent + cost <= limit then
    return POLL_US
  end
  return (cost > limit or to == 0) and NEVER or to - now
end

local function used_today(record)
  local from, to = window_of(COUNT, now)
  return record[COUNT_FROM] >= from and record[USED] or 0, from, to
end

local function count_wait(charge, cost)
  local used, _, to = used_today(record_of(charge.key))
  return used + cost > charge.limit and to - now or 0
end

-- Leaves where a rate would go in its charge, for `apply`.
local function rate_wait(charge, cost)
  local tat, rest = moved(record_of(charge.key), charge.at, charge.limit, cost)
  charge.tat, charge.rest = tat, rest
  return max(0, tat - now - MINUTE_US + (rest > 0 and 1 or 0))
end

local WAITS = {rate_wait, count_wait, slots_wait, budget_wait, budget_wait, budget_wait}

local function find_binding(charges, op)
  local binding, longest = -1, 0
  for i = 1, #charges do
    local charge = charges[i]
    local wait = WAITS[charge.kind](charge, op[COSTS + charge.measure])
    if wait == NEVER then
      return i - 1, NEVER
    end
    if wait > longest then
      binding, longest = i - 1, wait
    end
  end
  return binding, longest
end

local function hold_money(record, at, from, cost)
  -- One that is ahead, on a server whose clock was behind: see `charge_all`.
  change_budget(record, at, max(from, record[at + 2]), 0, cost)
end

local function apply(charge, cost, lease, expires, mode)
  local kind = charge.kind
  if kind == SLOTS then
    take_slot(charge.key, lease, expires)
    return
  end
  local record = record_of(charge.key)
  if kind >= DAY then
    hold_money(record, charge.at, window_of(kind, now), cost)
  elseif mode == RESTORE then
    return
  elseif kind == RATE then
    -- Where `rate_wait` has just found that it goes.
    move_to(record, charge.at, charge.limit, charge.tat, charge.rest)
  else
    local used, from = used_today(record)
    record[COUNT_FROM] = max(from, record[COUNT_FROM])
    record[USED], record.is_changed = used + cost, true
  end
end

local function answer(outcome, charges, binding, wait)
  local reply, n = {outcome, binding, wait}, 3
  for i = 1, #charges do
    local charge = charges[i]
    local kind, used, rest = charge.kind, 0, 0
    if kind == RATE then
      used, rest = tat_of(record_of(charge.key), charge.at, charge.limit)
      used = used - now
    elseif kind == SLOTS then
      used = slots_of(charge.key).num
    elseif kind == COUNT then
      local _, to
      used, _, to = used_today(record_of(charge.key))
      rest = to - now
    else
      local record, at, from, to = record_of(charge.key), charge.at, window_of(kind, now)
      if is_kept(record, at, from) then
        used = record[at] + record[at + 1]
      end
      rest = to > 0 and to - now or 0
    end
    reply[n + 1], reply[n + 2] = used, rest
    n = n + 2
  end
  return reply
end

-- Takes back what a lease rebuilt from the ledger holds: its gateway says what it really is.
local function undo_rebuilt(hold)
  for _, charge in ipairs(hold.charges) do
    local from = window_of(charge.kind, hold[AT])
    change_kept(record_of(charge.key), charge.at, from, 0, -hold[AMOUNT + charge.measure])
  end
end

local function too_large(charges, op)
  for i = 1, #charges do
    local charge = charges[i]
    if charge.kind < DAY and op[COSTS + charge.measure] > charge.limit then
      return i - 1
    end
  end
end

local function charge_all(charges, op, packed)
  local lease, expires, mode, at = op[3], text(now + op[4]), op[5], now
  for i = 1, #charges do
    local charge = charges[i]
    apply(charge, op[COSTS + charge.measure], lease, expires, mode)
    if charge.kind == DAY or charge.kind == MONTH then
      -- The lease is of the windows that it is counted in, whatever the clock says.
      at = max(at, records[charge.key][charge.at + 2])
    end
  end
  local state = mode == RESTORE and RESTORED or PLAIN
  local hold = pack(HOLD, at, state, op[6], op[7], op[8], op[9], op[10], op[11])
  keep_lease(lease, hold .. packed, expires)
end

local function admit(op, args)
  local packed, mode = args[4 + op[2]], op[5]
  local set = set_of(packed)
  local charges = set.charges
  read(set)
  if mode == PEEK then
    return answer(ADMITTED, charges, -1, 0)
  end
  local live = live_lease(op[3])
  if live and (live[STATE] ~= REBUILT or mode ~= RESTORE) then
    return answer(ADMITTED, charges, -1, 0)
  end
  local reply = has_ledger and unseeded(charges)
  if reply then
    return reply
  end
  if live then
    undo_rebuilt(live)
  end
  if mode == NORMAL then
    local excess = too_large(charges, op)
    if excess then
      return answer(TOO_LARGE, charges, excess, NEVER)
    end
    local binding, wait = find_binding(charges, op)
    if wait ~= 0 then
      return answer(DENIED, charges, binding, wait)
    end
  end
  charge_all(charges, op, packed)
  return answer(ADMITTED, charges, -1, 0)
end

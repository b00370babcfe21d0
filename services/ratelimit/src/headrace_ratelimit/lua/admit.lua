-- Admission: decides over all charges of one request, then charges all or none.
-- Operation: ADMIT, number of the set, lease id, its life in microseconds, mode, amounts by measure.
-- Answer, packed: outcome, index of the binding charge (from 0; -1 = none), wait (NEVER = waiting does not
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
      is_any = is_any or is_lost(charge, from_now[charge.kind])
    end
  end
  if not is_any then
    return nil
  end
  local reply = {UNSEEDED, -1, 0}
  for _, charge in ipairs(charges) do
    local from, to = 0, 0
    if charge.kind >= DAY and charge.kind ~= TOTAL then
      from, to = from_now[charge.kind], to_now[charge.kind]
    end
    reply[#reply + 1] = from
    reply[#reply + 1] = to
  end
  return pack('<' .. rep('i8', #reply), unpack(reply))
end

local function slots_wait(charge)
  if not are_slots_full(charge.key, charge.limit) then
    return 0
  end
  write_leases()
  local first = call('ZRANGE', charge.key, 0, 0, 'WITHSCORES')
  return first[2] and min(POLL_US, tonumber(first[2]) - now) or POLL_US
end

local function budget_wait(record, charge, cost)
  local at, limit, used = charge.at, charge.limit, cost
  local is_known = record[at + 2] >= from_now[charge.kind]
  if is_known then
    used = used + record[at] + record[at + 1]
  end
  if used <= limit then
    return 0
  end
  if cost + (is_known and record[at] or 0) <= limit then
    return POLL_US
  end
  local to = to_now[charge.kind]
  return (cost > limit or to == 0) and NEVER or to - now
end

local function used_today(record)
  return record[COUNT_FROM] >= from_now[COUNT] and record[USED] or 0
end

-- How long a request would wait for one charge; 0 = it passes.
local function wait_of(charge, record, cost)
  local kind = charge.kind
  if kind == RATE then
    local tat, rest = moved(record, charge, cost)
    -- For `apply`.
    charge.tat, charge.rest = tat, rest
    return max(0, tat - now - MINUTE_US + (rest > 0 and 1 or 0))
  elseif kind == SLOTS then
    return slots_wait(charge)
  elseif kind == COUNT then
    return used_today(record) + cost > charge.limit and to_now[COUNT] - now or 0
  end
  return budget_wait(record, charge, cost)
end

local function find_binding(charges, op)
  local binding, longest = -1, 0
  for i = 1, #charges do
    local charge = charges[i]
    local wait = wait_of(charge, records[charge.key], op[COSTS + charge.measure])
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
  if record[at + 2] < from then
    record[at], record[at + 1], record[at + 2] = 0, cost, from
  else
    -- One that is ahead, on a server whose clock was behind, is the lease's too: see `charge_all`.
    record[at + 1] = record[at + 1] + cost
  end
  record.is_changed = true
end

local function apply(charge, record, cost, lease, expires, mode)
  local kind = charge.kind
  if kind == SLOTS then
    take_slot(charge.key, lease, expires)
  elseif kind >= DAY then
    hold_money(record, charge.at, from_now[kind], cost)
  elseif mode == RESTORE then
    return
  elseif kind == RATE then
    -- Where `wait_of` has just found that it goes.
    move_to(record, charge.at, charge.limit, charge.tat, charge.rest)
  else
    local used = used_today(record)
    record[COUNT_FROM] = max(from_now[COUNT], record[COUNT_FROM])
    record[USED], record.is_changed = used + cost, true
  end
end

-- Numbers of eight bytes each: a string costs a third of a list.
local numbers, formats = {}, {}

local function answer(outcome, charges, binding, wait)
  local n = 3
  numbers[1], numbers[2], numbers[3] = outcome, binding, wait
  for i = 1, #charges do
    local charge = charges[i]
    local kind, record, at = charge.kind, records[charge.key], charge.at
    local used, rest = 0, 0
    if kind == RATE then
      used, rest = tat_of(record, at, charge.limit)
      used = used - now
    elseif kind == SLOTS then
      used = slots_of(charge.key).num
    else
      if kind == COUNT then
        used = used_today(record)
      elseif record[at + 2] >= from_now[kind] then
        used = record[at] + record[at + 1]
      end
      rest = to_now[kind] > 0 and to_now[kind] - now or 0
    end
    numbers[n + 1], numbers[n + 2] = used, rest
    n = n + 2
  end
  formats[n] = formats[n] or '<' .. rep('i8', n)
  return pack(formats[n], unpack(numbers, 1, n))
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
  local lease, expires, mode, at = op[3], in_text(op[4]), op[5], now
  for i = 1, #charges do
    local charge = charges[i]
    local record = records[charge.key]
    apply(charge, record, op[COSTS + charge.measure], lease, expires, mode)
    if charge.kind == DAY or charge.kind == MONTH then
      -- The lease is of the windows that it is counted in, whatever the clock says.
      at = max(at, record[charge.at + 2])
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

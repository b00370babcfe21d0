-- Admission: decides over all charges of one request, then charges all or none.
-- Operation: ADMIT, number of the set, lease id, its life in microseconds, amounts by measure, mode.
-- Answer: outcome, index of the binding charge (from 0; -1 = none), wait (NEVER = waiting does not
-- help), then two numbers per charge: what is used and its rest (rates) or the microseconds until
-- the window ends. UNSEEDED: the two are the window of each budget, start and end.
local NORMAL, RESTORE, PEEK = 0, 1, 2

-- Whether a budget that is not here may have been lost rather than never used: its window began
-- before this tenant's data did.
local function is_lost(key, window)
  if not has_ledger or budget_of(key).is_kept then
    return false
  end
  local since = call('GET', since_key)
  return not since or window.from < tonumber(since)
end

local function unseeded(charges)
  local reply, is_any = {UNSEEDED, -1, 0}, false
  for _, charge in ipairs(charges) do
    local from, to = 0, 0
    if charge.kind >= DAY then
      local key, window = key_of(charge, now)
      from, to = window.from, window.to
      is_any = is_any or is_lost(key, window)
    end
    reply[#reply + 1] = from
    reply[#reply + 1] = to
  end
  return is_any and reply or nil
end

local function rate_wait(charge, key, cost)
  local tat, rest = moved(rate_of(key), charge.limit, cost)
  charge.tat, charge.rest = tat, rest
  return math.max(0, tat - now - MINUTE_US + (rest > 0 and 1 or 0))
end

local function slots_wait(charge, key)
  if not are_slots_full(key, charge.limit) then
    return 0
  end
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  return first[2] and math.min(POLL_US, tonumber(first[2]) - now) or POLL_US
end

local function budget_wait(charge, key, cost, window)
  local budget = budget_of(key)
  if budget.spent + budget.held + cost <= charge.limit then
    return 0
  end
  if budget.spent + cost <= charge.limit then
    return POLL_US
  end
  return (cost > charge.limit or window.to == 0) and NEVER or window.to - now
end

local function wait_of(charge, cost)
  local key, window = key_of(charge, now)
  if charge.kind == RATE then
    return rate_wait(charge, key, cost)
  elseif charge.kind == COUNT then
    return count_of(key).used + cost > charge.limit and window.to - now or 0
  elseif charge.kind == SLOTS then
    return slots_wait(charge, key)
  end
  return budget_wait(charge, key, cost, window)
end

local function find_binding(charges, amounts)
  local binding, longest = -1, 0
  for i, charge in ipairs(charges) do
    local wait = wait_of(charge, amounts[charge.measure])
    if wait == NEVER then
      return i - 1, NEVER
    end
    if wait > longest then
      binding, longest = i - 1, wait
    end
  end
  return binding, longest
end

local function apply(charge, amounts, lease, expires, mode)
  local key, window = key_of(charge, now)
  local cost = amounts[charge.measure]
  if charge.kind == SLOTS then
    take_slot(key, lease, expires)
  elseif charge.kind >= DAY then
    change_budget(key, 0, cost, window)
  elseif mode == RESTORE then
    return
  elseif charge.kind == RATE then
    -- Where `rate_wait` has just found that it goes.
    move_to(rate_of(key), charge.limit, charge.tat, charge.rest)
  else
    local count = count_of(key)
    count.used, count.is_changed = count.used + cost, true
  end
end

local function answer(outcome, charges, binding, wait)
  local reply = {outcome, binding, wait}
  for _, charge in ipairs(charges) do
    local key, window = key_of(charge, now)
    local used, rest
    if charge.kind == RATE then
      used, rest = tat_of(rate_of(key), charge.limit)
      used = used - now
    elseif charge.kind == COUNT then
      used, rest = count_of(key).used, window.to - now
    elseif charge.kind == SLOTS then
      used, rest = slots_of(key).num, 0
    else
      local budget = budget_of(key)
      used, rest = budget.spent + budget.held, window.to > 0 and window.to - now or 0
    end
    reply[#reply + 1] = used
    reply[#reply + 1] = rest
  end
  return reply
end

-- Takes back what a lease rebuilt from the ledger holds: its gateway says what it really is.
local function undo_rebuilt(it)
  for _, charge in ipairs(set_of(it[1])) do
    local key, window = key_of(charge, it[2])
    change_budget(key, 0, -it[3][charge.measure], window)
  end
end

local function admit(op)
  local packed, lease, lease_us, amounts, mode = ARGV[4 + op[2]], op[3], op[4], op[5], op[6]
  local charges = set_of(packed)
  read_rates(charges)
  if mode == PEEK then
    return answer(ADMITTED, charges, -1, 0)
  end
  local live = live_lease(lease)
  if live and (live[4] ~= REBUILT or mode ~= RESTORE) then
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
    for i, charge in ipairs(charges) do
      if charge.kind < DAY and amounts[charge.measure] > charge.limit then
        return answer(TOO_LARGE, charges, i - 1, NEVER)
      end
    end
    local binding, wait = find_binding(charges, amounts)
    if wait ~= 0 then
      return answer(DENIED, charges, binding, wait)
    end
  end
  for _, charge in ipairs(charges) do
    apply(charge, amounts, lease, now + lease_us, mode)
  end
  keep_lease(lease, packed, now, amounts, mode == RESTORE and RESTORED or PLAIN, now + lease_us)
  return answer(ADMITTED, charges, -1, 0)
end

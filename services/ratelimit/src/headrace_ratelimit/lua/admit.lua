-- Decides over all charges of one request, then charges all or none.
-- ARGV[2] lease id, ARGV[3] its life in microseconds, then five per charge: kind, measure, limit,
-- cost, name. Returns outcome (1 admitted, 2 denied, 3 too large), index of the binding charge (from
-- 0; -1 = none), wait (NEVER = waiting does not help), then two numbers per charge: what is used and
-- its rest (rates) or the microseconds until the window ends.
local ADMITTED, DENIED, TOO_LARGE = 1, 2, 3
local lease, lease_us = ARGV[2], tonumber(ARGV[3])

local function read_charges()
  local charges = {}
  for i = 4, #ARGV, 5 do
    local charge = {
      kind = ARGV[i],
      measure = ARGV[i + 1],
      limit = tonumber(ARGV[i + 2]),
      cost = tonumber(ARGV[i + 3]),
      key = base .. ':' .. ARGV[i + 4],
    }
    if charge.kind ~= 'rate' and charge.kind ~= 'slots' then
      local window
      window, charge.reset = window_of(charge.kind)
      charge.key = charge.key .. ':' .. window
    end
    charges[#charges + 1] = charge
  end
  return charges
end

local function budget(key)
  local values = redis.call('HMGET', key, 'spent', 'held')
  return tonumber(values[1] or '0'), tonumber(values[2] or '0')
end

local waits = {}

function waits.rate(charge)
  local tat, rest = moved(charge.key, charge.limit, charge.cost)
  return math.max(0, tat - now - MINUTE_US + (rest > 0 and 1 or 0))
end

function waits.count(charge)
  local used = tonumber(redis.call('GET', charge.key) or '0')
  return used + charge.cost > charge.limit and charge.reset or 0
end

function waits.slots(charge)
  if redis.call('ZCARD', charge.key) < charge.limit then
    return 0
  end
  local first = redis.call('ZRANGE', charge.key, 0, 0, 'WITHSCORES')
  return math.min(POLL_US, tonumber(first[2]) - now)
end

local function budget_wait(charge)
  local spent, held = budget(charge.key)
  if spent + held + charge.cost <= charge.limit then
    return 0
  end
  if spent + charge.cost <= charge.limit then
    return POLL_US
  end
  return (charge.cost > charge.limit or charge.reset == 0) and NEVER or charge.reset
end
waits.day, waits.month, waits.total = budget_wait, budget_wait, budget_wait

local function apply(charge)
  if charge.kind == 'rate' then
    move(charge.key, charge.limit, charge.cost)
  elseif charge.kind == 'count' then
    redis.call('INCRBY', charge.key, text(charge.cost))
    redis.call('PEXPIRE', charge.key, 2 * DAY_MS)
  elseif charge.kind == 'slots' then
    redis.call('ZADD', charge.key, text(now + lease_us), lease)
    redis.call('PEXPIRE', charge.key, DAY_MS)
  else
    add(charge.key, 'held', charge.cost)
    if charge.reset > 0 then
      redis.call('PEXPIRE', charge.key, text(math.floor(charge.reset / 1000) + 7 * DAY_MS))
    end
  end
end

local function answer(outcome, charges, binding, wait)
  local reply = {outcome, binding, wait}
  for _, charge in ipairs(charges) do
    local used, rest
    if charge.kind == 'rate' then
      used, rest = load_tat(charge.key, charge.limit)
      used = used - now
    elseif charge.kind == 'count' then
      used, rest = tonumber(redis.call('GET', charge.key) or '0'), charge.reset
    elseif charge.kind == 'slots' then
      used, rest = redis.call('ZCARD', charge.key), 0
    else
      local spent, held = budget(charge.key)
      used, rest = spent + held, charge.reset
    end
    reply[#reply + 1] = used
    reply[#reply + 1] = rest
  end
  return reply
end

local function find_binding(charges)
  local binding, longest = -1, 0
  for i, charge in ipairs(charges) do
    local wait = waits[charge.kind](charge)
    if wait == NEVER then
      return i - 1, NEVER
    end
    if wait > longest then
      binding, longest = i - 1, wait
    end
  end
  return binding, longest
end

sweep()
local charges = read_charges()
for _, charge in ipairs(charges) do
  if charge.kind == 'slots' then
    redis.call('ZREMRANGEBYSCORE', charge.key, '-inf', text(now))
  end
end
if live_lease(lease) then
  return answer(ADMITTED, charges, -1, 0)
end
for i, charge in ipairs(charges) do
  if not is_budget(charge.kind) and charge.cost > charge.limit then
    return answer(TOO_LARGE, charges, i - 1, NEVER)
  end
end
local binding, wait = find_binding(charges)
if wait ~= 0 then
  return answer(DENIED, charges, binding, wait)
end
for _, charge in ipairs(charges) do
  apply(charge)
end
redis.call('ZADD', leases_key, text(now + lease_us), lease)
redis.call('SET', base .. ':lease:' .. lease, cmsgpack.pack(charges))
return answer(ADMITTED, charges, -1, 0)

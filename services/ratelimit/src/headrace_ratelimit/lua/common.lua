-- Put before each script. KEYS[1] is the tenant's base key "hr:rl:{tenant}"; every other key is made
-- from it, so the hash tag keeps all of them in one slot of a cluster.
-- ARGV[1]: the time in microseconds; 0 = the server's clock, which is what production sends.
-- Numbers are doubles: every value stays a whole number below 2^53 (see limiter.py).
local MINUTE_US, MAX_DEBT_US, DAY_US, POLL_US = 60000000, 60000000, 86400000000, 1000000
local NEVER = -1
-- Longest sweep in one call: the rest is left to the next.
local MAX_SWEEP = 64
-- Real time that a key outlives its use. Milliseconds.
local SLACK_MS = 60000
local LATE_MS = 600000
local DAY_MS = 86400000

local base = KEYS[1]
local leases_key = base .. ':leases'
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Lua's own number format rounds to 14 digits; adding 0 turns -0 into 0.
local function text(number)
  return string.format('%.0f', number + 0)
end

-- Floor division that is exact for whole a below 2^53 and b > 0: the quotient as a double may round up.
local function divmod(a, b)
  local quotient = math.floor(a / b)
  local rest = a - quotient * b
  if rest < 0 then
    return quotient - 1, rest + b
  end
  if rest >= b then
    return quotient + 1, rest - b
  end
  return quotient, rest
end

-- Year and month of a day number (Howard Hinnant, "chrono-compatible low-level date algorithms").
local function month_of(day)
  local z = day + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524)
    - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return yoe + era * 400 + (month <= 2 and 1 or 0), month
end

local function first_day_of(year, month)
  local y = month <= 2 and year - 1 or year
  local era = math.floor(y / 400)
  local yoe = y - era * 400
  local doy = math.floor((153 * (month > 2 and month - 3 or month + 9) + 2) / 5)
  return era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy - 719468
end

-- The current window's name and the microseconds until it ends; 0 = it never does.
local function window_of(kind)
  if kind == 'total' then
    return 'all', 0
  end
  local day = math.floor(now / DAY_US)
  if kind == 'month' then
    local year, month = month_of(day)
    local following = month == 12 and first_day_of(year + 1, 1) or first_day_of(year, month + 1)
    return string.format('%04d%02d', year, month), following * DAY_US - now
  end
  return text(day), (day + 1) * DAY_US - now
end

local function is_budget(kind)
  return kind == 'day' or kind == 'month' or kind == 'total'
end

-- TAT of a rate: microseconds and a rest in 1/limit of one; never before now.
local function load_tat(key, limit)
  local value = redis.call('GET', key)
  if not value then
    return now, 0
  end
  local tat, rest, rest_of = string.match(value, '^(%d+) (%d+) (%d+)$')
  tat, rest = tonumber(tat), tonumber(rest)
  if tonumber(rest_of) ~= limit then
    tat, rest = tat + (rest > 0 and 1 or 0), 0
  end
  if tat < now then
    return now, 0
  end
  return tat, rest
end

-- Where TAT would go with *cost* (which may be negative) added.
local function moved(key, limit, cost)
  local tat, rest = load_tat(key, limit)
  local step, step_rest = divmod(cost * MINUTE_US, limit)
  local carry, new_rest = divmod(rest + step_rest, limit)
  return tat + step + carry, new_rest
end

local function move(key, limit, cost)
  local tat, rest = moved(key, limit, cost)
  local latest = now + MINUTE_US + MAX_DEBT_US
  if tat >= latest then
    tat, rest = latest, 0
  end
  if tat < now then
    redis.call('DEL', key)
  else
    local ms = math.floor((tat - now) / 1000) + SLACK_MS
    redis.call('SET', key, text(tat) .. ' ' .. text(rest) .. ' ' .. text(limit), 'PX', text(ms))
  end
end

local function add(key, field, amount)
  redis.call('HINCRBY', key, field, text(amount))
end

-- Ends a lease that nobody renewed: slots and held money come back, rates stand as reserved. What
-- it was is kept for a while, so that a late settle still books the money.
local function expire_lease(lease)
  local lease_key = base .. ':lease:' .. lease
  local packed = redis.call('GET', lease_key)
  redis.call('ZREM', leases_key, lease)
  if not packed then
    return
  end
  local holds_money = false
  for _, charge in ipairs(cmsgpack.unpack(packed)) do
    if charge.kind == 'slots' then
      redis.call('ZREM', charge.key, lease)
    elseif is_budget(charge.kind) then
      holds_money = true
      if redis.call('EXISTS', charge.key) == 1 then
        add(charge.key, 'held', -charge.cost)
      end
    end
  end
  redis.call('DEL', lease_key)
  if holds_money then
    redis.call('SET', base .. ':late:' .. lease, packed, 'PX', LATE_MS)
  end
end

local function sweep()
  local expired = redis.call(
    'ZRANGE', leases_key, '-inf', text(now), 'BYSCORE', 'LIMIT', 0, MAX_SWEEP)
  for _, lease in ipairs(expired) do
    expire_lease(lease)
  end
end

-- The charges of a live lease, or nil. An expired one that the sweep left over is ended first.
local function live_lease(lease)
  local expires = redis.call('ZSCORE', leases_key, lease)
  if not expires then
    return nil
  end
  if tonumber(expires) <= now then
    expire_lease(lease)
    return nil
  end
  local packed = redis.call('GET', base .. ':lease:' .. lease)
  return packed and cmsgpack.unpack(packed) or nil
end

-- First part of the one script. A call serves a batch of operations of one tenant, in order and at
-- one moment. KEYS[1] is the tenant's base key "hr:rl:{tenant}"; every other key is made from it, so
-- the hash tag keeps all of them in one slot of a cluster.
-- ARGV[1] the time in microseconds; 0 = the server's clock, which is what production sends.
-- ARGV[2] '1': a budget that is not here may have been lost, and the ledger must be asked.
-- ARGV[3] the operations (MessagePack). ARGV[4..] sets of charges that they name by number: kind,
-- measure, limit, name, and so on (MessagePack).
-- Numbers are doubles: every value stays a whole number below 2^53 (see limiter.py).
local RATE, COUNT, SLOTS, DAY, MONTH, TOTAL = 1, 2, 3, 4, 5, 6
local MINUTE_US, MAX_DEBT_US, DAY_US, POLL_US = 60000000, 60000000, 86400000000, 1000000
local ADMITTED, DENIED, TOO_LARGE, UNSEEDED = 1, 2, 3, 5
local NEVER = -1
-- Longest sweep in one call: the rest is left to the next.
local MAX_SWEEP = 64
-- Real time that a key outlives its use. Milliseconds.
local SLACK_MS = 60000
local LATE_MS = 600000
local DAY_MS = 86400000

local call, floor = redis.call, math.floor
local base = KEYS[1]
local leases_key, held_key, since_key = base .. ':leases', base .. ':held', base .. ':since'
local has_ledger = ARGV[2] == '1'
local now = tonumber(ARGV[1])
if now == 0 then
  local time = call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Lua's own number format rounds to 14 digits; adding 0 turns -0 into 0.
local function text(number)
  return string.format('%.0f', number + 0)
end

-- Floor division that is exact for whole a below 2^53 and b > 0: the quotient as a double may round up.
local function divmod(a, b)
  local quotient = floor(a / b)
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
  local era = floor(z / 146097)
  local doe = z - era * 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  local mp = floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return yoe + era * 400 + (month <= 2 and 1 or 0), month
end

local function first_day_of(year, month)
  local y = month <= 2 and year - 1 or year
  local era = floor(y / 400)
  local yoe = y - era * 400
  local doy = floor((153 * (month > 2 and month - 3 or month + 9) + 2) / 5)
  return era * 146097 + yoe * 365 + floor(yoe / 4) - floor(yoe / 100) + doy - 719468
end

local windows = {}

-- The window of *kind* that *at* lies in: its name, start and end; end 0 = it never ends.
local function window_of(kind, at)
  if kind == TOTAL then
    return {name = 'all', from = 0, to = 0}
  end
  local day = floor(at / DAY_US)
  local known = kind == MONTH and -day - 1 or day
  local window = windows[known]
  if window then
    return window
  end
  if kind == MONTH then
    local year, month = month_of(day)
    local following = month == 12 and first_day_of(year + 1, 1) or first_day_of(year, month + 1)
    window = {
      name = string.format('%04d%02d', year, month),
      from = first_day_of(year, month) * DAY_US,
      to = following * DAY_US,
    }
  else
    window = {name = text(day), from = day * DAY_US, to = (day + 1) * DAY_US}
  end
  windows[known] = window
  return window
end

-- What was read in this call, by key, and is written back at its end if it changed. -------------
local rates, counts, slots, budgets = {}, {}, {}, {}

local function note_rate(key, value)
  local rate = {tat = 0, rest = 0, rest_of = 0}
  if value then
    local tat, rest, rest_of = string.match(value, '^(%d+) (%d+) (%d+)$')
    rate.tat, rate.rest, rate.rest_of = tonumber(tat), tonumber(rest), tonumber(rest_of)
    rate.is_kept = true
  end
  rates[key] = rate
  return rate
end

local function rate_of(key)
  return rates[key] or note_rate(key, call('GET', key))
end

-- Reads the rates of a set at once.
local function read_rates(charges)
  local keys = {}
  for _, charge in ipairs(charges) do
    if charge.kind == RATE and not rates[charge.key] then
      keys[#keys + 1] = charge.key
    end
  end
  if keys[2] then
    for i, value in ipairs(call('MGET', unpack(keys))) do
      note_rate(keys[i], value)
    end
  end
end

local function count_of(key)
  local count = counts[key]
  if not count then
    count = {used = tonumber(call('GET', key) or '0')}
    counts[key] = count
  end
  return count
end

local function slots_of(key)
  local held = slots[key]
  if not held then
    held = {num = call('ZCARD', key)}
    held.is_new = held.num == 0
    slots[key] = held
  end
  return held
end

-- Whether a limit of slots is reached. The sweep frees what has ended, but for what it left over.
local function are_slots_full(key, limit)
  local held = slots_of(key)
  if held.num >= limit then
    held.num = held.num - call('ZREMRANGEBYSCORE', key, '-inf', text(now))
  end
  return held.num >= limit
end

local function budget_of(key)
  local budget = budgets[key]
  if not budget then
    local values = call('HMGET', key, 'spent', 'held')
    budget = {
      is_kept = values[1] and true,
      spent = tonumber(values[1] or '0'),
      held = tonumber(values[2] or '0'),
    }
    budgets[key] = budget
  end
  return budget
end

local function change_budget(key, spent, held, window)
  local budget = budget_of(key)
  if not budget.is_kept then
    budget.is_new, budget.is_kept, budget.to = true, true, window.to
  end
  budget.spent, budget.held, budget.is_changed = budget.spent + spent, budget.held + held, true
end

local function take_slot(key, lease, expires)
  local held = slots_of(key)
  held.num = held.num + call('ZADD', key, text(expires), lease)
end

local function free_slot(key, lease)
  local held = slots_of(key)
  held.num = held.num - call('ZREM', key, lease)
end

-- TAT of a rate: microseconds and a rest in 1/limit of one; never before now.
local function tat_of(rate, limit)
  local tat, rest = rate.tat, rate.rest
  if rate.rest_of ~= limit then
    tat, rest = tat + (rest > 0 and 1 or 0), 0
  end
  if tat < now then
    return now, 0
  end
  return tat, rest
end

-- Where TAT would go with *cost* (which may be negative) added.
local function moved(rate, limit, cost)
  local tat, rest = tat_of(rate, limit)
  local step, step_rest = divmod(cost * MINUTE_US, limit)
  local carry, new_rest = divmod(rest + step_rest, limit)
  return tat + step + carry, new_rest
end

local function move_to(rate, limit, tat, rest)
  local latest = now + MINUTE_US + MAX_DEBT_US
  if tat >= latest then
    tat, rest = latest, 0
  end
  rate.tat, rate.rest, rate.rest_of, rate.is_changed = tat, rest, limit, true
end

local function move(key, limit, cost)
  local rate = rate_of(key)
  move_to(rate, limit, moved(rate, limit, cost))
end

local is_first_lease, has_renewed = false, false

local function write_back()
  -- A lease outlives the life that its keys got from the first one only by renewals, which come often
  -- and lengthen it.
  if is_first_lease or has_renewed then
    call('PEXPIRE', leases_key, DAY_MS)
    call('PEXPIRE', held_key, DAY_MS)
  end
  for key, rate in pairs(rates) do
    if rate.is_changed and rate.tat >= now then
      local ms = floor((rate.tat - now) / 1000) + SLACK_MS
      local value = text(rate.tat) .. ' ' .. text(rate.rest) .. ' ' .. text(rate.rest_of)
      call('SET', key, value, 'PX', text(ms))
    elseif rate.is_changed and rate.is_kept then
      call('DEL', key)
    end
  end
  for key, count in pairs(counts) do
    if count.is_changed then
      call('SET', key, text(count.used), 'PX', 2 * DAY_MS)
    end
  end
  for key, held in pairs(slots) do
    if held.is_new and held.num > 0 or held.is_renewed then
      call('PEXPIRE', key, DAY_MS)
    end
  end
  for key, budget in pairs(budgets) do
    if budget.is_changed then
      call('HSET', key, 'spent', text(budget.spent), 'held', text(budget.held))
      if budget.is_new and budget.to > 0 then
        call('PEXPIRE', key, text(math.max(floor((budget.to - now) / 1000), 0) + 7 * DAY_MS))
      end
    end
  end
end

-- Sets of charges and leases ----------------------------------------------------------------------
local sets = {}

-- A set as a list of charges: {kind, measure, limit, key without window}.
local function set_of(packed)
  local set = sets[packed]
  if not set then
    local flat = cmsgpack.unpack(packed)
    set = {}
    for i = 1, #flat, 4 do
      set[#set + 1] = {
        kind = flat[i], measure = flat[i + 1], limit = flat[i + 2], key = base .. ':' .. flat[i + 3],
      }
    end
    sets[packed] = set
  end
  return set
end

-- The key of a charge that was made at *at*, and its window if it has one.
local function key_of(charge, at)
  if charge.kind == RATE or charge.kind == SLOTS then
    return charge.key, nil
  end
  if at ~= now then
    local window = window_of(charge.kind, at)
    return charge.key .. ':' .. window.name, window
  end
  if not charge.now_key then
    charge.now_window = window_of(charge.kind, now)
    charge.now_key = charge.key .. ':' .. charge.now_window.name
  end
  return charge.now_key, charge.now_window
end

-- What a lease holds: {packed set, admitted at, amounts by measure, state}. State: PLAIN; REBUILT from
-- the ledger, which knows of money only; RESTORED, so that its rates were not charged here.
local PLAIN, REBUILT, RESTORED = 0, 1, 2

local function keep_lease(lease, packed, at, amounts, state, expires)
  call('HSET', held_key, lease, cmsgpack.pack({packed, at, amounts, state}))
  call('ZADD', leases_key, text(expires), lease)
end

-- Ends a lease that nobody renewed: slots and held money come back, rates stand as reserved. What
-- it was is kept for a while, so that a late settle still books the money.
local function expire_lease(lease)
  local packed = call('HGET', held_key, lease)
  call('ZREM', leases_key, lease)
  if not packed then
    return
  end
  call('HDEL', held_key, lease)
  local it, holds_money = cmsgpack.unpack(packed), false
  for _, charge in ipairs(set_of(it[1])) do
    if charge.kind == SLOTS then
      free_slot(charge.key, lease)
    elseif charge.kind >= DAY then
      holds_money = true
      local key, window = key_of(charge, it[2])
      if budget_of(key).is_kept then
        change_budget(key, 0, -it[3][charge.measure], window)
      end
    end
  end
  if holds_money then
    call('SET', base .. ':late:' .. lease, packed, 'PX', LATE_MS)
  end
end

local function sweep()
  local first = call('ZRANGE', leases_key, 0, 0, 'WITHSCORES')
  is_first_lease = not first[1]
  if is_first_lease or tonumber(first[2]) > now then
    return
  end
  local expired = call('ZRANGE', leases_key, '-inf', text(now), 'BYSCORE', 'LIMIT', 0, MAX_SWEEP)
  for _, lease in ipairs(expired) do
    expire_lease(lease)
  end
end

-- What a live lease holds, or nil. An expired one that the sweep left over is ended first.
local function live_lease(lease)
  local expires = call('ZSCORE', leases_key, lease)
  if not expires then
    return nil
  end
  if tonumber(expires) <= now then
    expire_lease(lease)
    return nil
  end
  local packed = call('HGET', held_key, lease)
  return packed and cmsgpack.unpack(packed) or nil
end

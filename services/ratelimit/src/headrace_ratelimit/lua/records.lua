-- What is counted of one scope is one record: a string of doubles. 0 = nothing.
--  1..12  four rates: TAT, its rest, the limit that the rest belongs to (in 1/limit microseconds)
-- 13..14  requests of a day: used, start of the day
-- 15..23  budgets of day, month and total: spent, held, start of the window
-- A record keeps the latest window of each kind only: nobody asks for those that are over.
local FORMAT, SIZE = '<ddddddddddddddddddddddd', 23
local USED, COUNT_FROM, DAY_FROM, MONTH_FROM, TOTAL_FROM = 13, 14, 17, 20, 23
local BUDGETS = {[DAY] = 15, [MONTH] = 18, [TOTAL] = 21}

-- What was read in this call, by key, and is written back at its end if it changed.
local records, slots = {}, {}

local function note(key, value)
  local record
  if value then
    record = {unpack_of(FORMAT, value)}
  else
    record = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
  end
  records[key] = record
  return record
end

local function record_of(key)
  return records[key] or note(key, call('GET', key))
end

-- Reads the records of a set, at once.
local function read(set)
  local keys, missing = set.keys, nil
  for i = 1, #keys do
    if not records[keys[i]] then
      missing = missing or {}
      missing[#missing + 1] = keys[i]
    end
  end
  if not missing then
    return
  end
  if #missing == 1 then
    note(missing[1], call('GET', missing[1]))
    return
  end
  for i, value in ipairs(call('MGET', unpack(missing))) do
    note(missing[i], value)
  end
end

-- TAT of a rate: microseconds and a rest in 1/limit of one; never before now, nor beyond all debt.
local function tat_of(record, at, limit)
  local tat, rest = record[at], record[at + 1]
  if tat < now then
    return now, 0
  end
  if record[at + 2] ~= limit then
    tat, rest = tat + (rest > 0 and 1 or 0), 0
  end
  -- No request moves TAT further than this: the server's clock was ahead when it did.
  local bound = now + MINUTE_US + MAX_DEBT_US
  if tat > bound then
    record[at], record[at + 1], record[at + 2], record.is_changed = bound, 0, limit, true
    return bound, 0
  end
  return tat, rest
end

-- Where TAT would go with *cost* (which may be negative) added. What a cost is in time is noted in the
-- charge: many requests cost the same.
local function moved(record, charge, cost)
  local limit = charge.limit
  local tat, rest = tat_of(record, charge.at, limit)
  if charge.cost ~= cost then
    charge.step, charge.step_rest = divmod(cost * MINUTE_US, limit)
    charge.cost = cost
  end
  tat, rest = tat + charge.step, rest + charge.step_rest
  -- Both rests are below the limit.
  if rest >= limit then
    return tat + 1, rest - limit
  end
  return tat, rest
end

local function move_to(record, at, limit, tat, rest)
  local bound = now + MINUTE_US + MAX_DEBT_US
  if tat >= bound then
    tat, rest = bound, 0
  end
  record[at], record[at + 1], record[at + 2], record.is_changed = tat, rest, limit, true
end

local function is_kept(record, at, from)
  return record[at + 2] >= from
end

-- Changes a budget's window that begins at *from*, unless it is over.
local function change_budget(record, at, from, spent, held)
  if record[at + 2] < from then
    record[at], record[at + 1], record[at + 2] = 0, 0, from
  elseif record[at + 2] > from then
    return
  end
  record[at], record[at + 1] = record[at] + spent, record[at + 1] + held
  record.is_changed = true
end

-- The same, unless it is not here.
local function change_kept(record, at, from, spent, held)
  if record[at + 2] == from then
    change_budget(record, at, from, spent, held)
  end
end

local function slots_of(key)
  local held = slots[key]
  if not held then
    held = {num = call('ZCARD', key), new = {}, num_new = 0}
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

-- Of a lease that has none: `write_leases` does it.
local function take_slot(key, lease, expires)
  local held = slots_of(key)
  held.num = held.num + 1
  held.new[held.num_new + 1], held.new[held.num_new + 2] = expires, lease
  held.num_new = held.num_new + 2
end

local function free_slot(key, lease)
  local held = slots_of(key)
  held.num = held.num - call('ZREM', key, lease)
end

-- When nothing in a record is of use any more.
local function end_of(record)
  local last = now + MINUTE_US + MAX_DEBT_US
  if record[COUNT_FROM] > 0 then
    last = max(last, record[COUNT_FROM] + 2 * DAY_US)
  end
  if record[DAY_FROM] > 0 then
    last = max(last, record[DAY_FROM] + 8 * DAY_US)
  end
  if record[MONTH_FROM] > 0 then
    local _, to = window_of(MONTH, record[MONTH_FROM])
    last = max(last, to + 7 * DAY_US)
  end
  return last
end

local is_first_lease, has_renewed = false, false

local function write_back()
  -- A lease outlives the life that its keys got from the first one only by renewals, which come often
  -- and lengthen it.
  if is_first_lease or has_renewed then
    call('PEXPIRE', live_key, DAY_MS)
    call('PEXPIRE', holds_key, DAY_MS)
  end
  for key, record in pairs(records) do
    if record.is_changed then
      local packed = pack(FORMAT, unpack(record, 1, SIZE))
      if record[TOTAL_FROM] > 0 then
        call('SET', key, packed)
      else
        call('SET', key, packed, 'PX', text(floor((end_of(record) - now) / 1000) + SLACK_MS))
      end
    end
  end
  for key, held in pairs(slots) do
    if held.is_new and held.num > 0 or held.is_renewed then
      call('PEXPIRE', key, DAY_MS)
    end
  end
end

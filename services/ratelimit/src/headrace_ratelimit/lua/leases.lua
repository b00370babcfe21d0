-- Sets of charges and leases.
-- Sets that were seen lately stay: they depend on nothing but their text.
local MAX_SETS = 4096
local sets, num_sets = {}, 0

local function place_of(kind, measure)
  if kind == RATE then
    return 3 * measure - 2
  end
  return kind == COUNT and USED or BUDGETS[kind]
end

-- A set as {charges, keys of the records that they need}. A charge: kind, measure, limit, the key of
-- its record (of its leases, for slots) and its place there.
local function set_of(packed)
  local name = base .. packed
  local set = sets[name]
  if set then
    return set
  end
  local flat, known = decode(packed), {}
  set = {charges = {}, keys = {}}
  for i = 1, #flat, 4 do
    local kind, key = flat[i], base .. ':' .. flat[i + 3]
    if kind == SLOTS then
      key = base .. ':slots:' .. flat[i + 3]
    elseif not known[key] then
      known[key] = true
      set.keys[#set.keys + 1] = key
    end
    local measure = flat[i + 1]
    set.charges[#set.charges + 1] = {
      kind = kind, measure = measure, limit = flat[i + 2], key = key, at = place_of(kind, measure),
    }
  end
  if num_sets >= MAX_SETS then
    sets, num_sets = {}, 0
  end
  sets[name], num_sets = set, num_sets + 1
  return set
end

-- What a lease holds, as a string: admitted at, state, amounts by measure (doubles), packed set.
-- State: PLAIN; REBUILT from the ledger, which knows of money only; RESTORED, so that its rates were
-- not charged here.
local PLAIN, REBUILT, RESTORED = 0, 1, 2
local HOLD, HOLD_BYTES = '<dddddddd', 64
-- Places in an unpacked hold; `AMOUNT` + measure is an amount.
local AT, STATE, AMOUNT = 1, 2, 2

local function hold_of(packed)
  local hold = {unpack_of(HOLD, packed)}
  hold.charges = set_of(sub(packed, HOLD_BYTES + 1)).charges
  return hold
end

-- Leases taken in this call: written together, before anything but an admission looks at leases.
-- By lease, what it holds; then leases with what they hold, and with their expiry.
local held_anew, new_holds, new_lives, num_new = {}, {}, {}, 0

local function keep_lease(lease, packed, expires)
  held_anew[lease] = packed
  new_holds[num_new + 1], new_holds[num_new + 2] = lease, packed
  new_lives[num_new + 1], new_lives[num_new + 2] = expires, lease
  num_new = num_new + 2
end

local function write_leases()
  if num_new > 0 then
    call('HSET', holds_key, unpack(new_holds, 1, num_new))
    call('ZADD', live_key, unpack(new_lives, 1, num_new))
    held_anew, num_new = {}, 0
  end
  for key, held in pairs(slots) do
    if held.num_new > 0 then
      call('ZADD', key, unpack(held.new, 1, held.num_new))
      held.num_new = 0
    end
  end
end

-- Ends a lease that nobody renewed: slots and held money come back, rates stand as reserved. What
-- it was is kept for a while, so that a late settle still books the money.
local function expire_lease(lease)
  local packed = call('HGET', holds_key, lease)
  call('ZREM', live_key, lease)
  if not packed then
    return
  end
  call('HDEL', holds_key, lease)
  local hold, holds_money = hold_of(packed), false
  for _, charge in ipairs(hold.charges) do
    if charge.kind == SLOTS then
      free_slot(charge.key, lease)
    elseif charge.kind >= DAY then
      holds_money = true
      local from = window_of(charge.kind, hold[AT])
      change_kept(record_of(charge.key), charge.at, from, 0, -hold[AMOUNT + charge.measure])
    end
  end
  if holds_money then
    call('SET', base .. ':late:' .. lease, packed, 'PX', LATE_MS)
  end
end

local function sweep()
  local first = call('ZRANGE', live_key, 0, 0, 'WITHSCORES')
  is_first_lease = not first[1]
  if is_first_lease or tonumber(first[2]) > now then
    return
  end
  local expired = call('ZRANGE', live_key, '-inf', text(now), 'BYSCORE', 'LIMIT', 0, MAX_SWEEP)
  for _, lease in ipairs(expired) do
    expire_lease(lease)
  end
end

-- What a live lease holds, or nil. An expired one that the sweep left over is ended first.
local function live_lease(lease)
  if held_anew[lease] then
    return hold_of(held_anew[lease])
  end
  local packed = call('HGET', holds_key, lease)
  if not packed then
    return nil
  end
  local expires = call('ZSCORE', live_key, lease)
  if not expires or tonumber(expires) <= now then
    expire_lease(lease)
    return nil
  end
  return hold_of(packed)
end

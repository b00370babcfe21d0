-- Settlement: replaces a lease's reservation by what was used.
-- Operation: SETTLE, lease id, actual amounts by measure, then kind and name of each budget to book
-- the cost to if the lease is unknown here: it was granted while this store was away.
-- Answer: 1 if the lease was live, else 0.
local COST = 5

local function settle_charge(charge, lease, it, actual)
  local key, window = key_of(charge, it[2])
  local delta = actual[charge.measure] - it[3][charge.measure]
  if charge.kind == SLOTS then
    free_slot(key, lease)
  elseif charge.kind >= DAY then
    if budget_of(key).is_kept then
      change_budget(key, actual[charge.measure], -it[3][charge.measure], window)
    end
  elseif it[4] == RESTORED then
    return
  elseif charge.kind == RATE then
    move(key, charge.limit, delta)
  elseif call('EXISTS', key) == 1 or count_of(key).is_changed then
    local count = count_of(key)
    count.used, count.is_changed = count.used + delta, true
  end
end

local function spend_late(packed, cost)
  local it = cmsgpack.unpack(packed)
  for _, charge in ipairs(set_of(it[1])) do
    if charge.kind >= DAY then
      local key, window = key_of(charge, it[2])
      if budget_of(key).is_kept then
        change_budget(key, cost, 0, window)
      end
    end
  end
end

-- Money of a lease that was granted while this store was away. Once only.
local function book_foreign(op, lease, cost)
  if #op < 4 or not call('SET', base .. ':done:' .. lease, 1, 'NX', 'PX', LATE_MS) then
    return
  end
  for i = 4, #op, 2 do
    local window = window_of(op[i], now)
    local key = base .. ':' .. op[i + 1] .. ':' .. window.name
    -- One that is not here will come from the ledger, with this in it.
    if not has_ledger or budget_of(key).is_kept then
      change_budget(key, cost, 0, window)
    end
  end
end

local function settle(op)
  local lease, actual = op[2], op[3]
  local it = live_lease(lease)
  if it then
    for _, charge in ipairs(set_of(it[1])) do
      settle_charge(charge, lease, it, actual)
    end
    call('HDEL', held_key, lease)
    call('ZREM', leases_key, lease)
    return 1
  end
  local late_key = base .. ':late:' .. lease
  local late = call('GET', late_key)
  if late then
    call('DEL', late_key)
    spend_late(late, actual[COST])
  else
    book_foreign(op, lease, actual[COST])
  end
  return 0
end

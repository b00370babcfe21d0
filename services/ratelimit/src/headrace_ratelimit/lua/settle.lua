-- Settlement: replaces a lease's reservation by what was used.
-- Operation: SETTLE, lease id, actual amounts by measure, then kind and scope of each budget to book
-- the cost to if the lease is unknown here: it was granted while this store was away.
-- Answer: 1 if the lease was live, else 0.
local ACTUAL, COST, FOREIGN = 2, 5, 9

local function settle_charge(charge, lease, hold, actual)
  local kind, reserved = charge.kind, hold[AMOUNT + charge.measure]
  if kind == SLOTS then
    free_slot(charge.key, lease)
    return
  end
  local record = record_of(charge.key)
  if kind >= DAY then
    change_kept(record, charge.at, window_of(kind, hold[AT]), actual, -reserved)
  elseif hold[STATE] == RESTORED then
    return
  elseif kind == RATE then
    move_to(record, charge.at, charge.limit, moved(record, charge, actual - reserved))
  elseif record[COUNT_FROM] == window_of(COUNT, hold[AT]) then
    record[USED], record.is_changed = record[USED] + actual - reserved, true
  end
end

local function spend_late(packed, cost)
  local hold = hold_of(packed)
  for _, charge in ipairs(hold.charges) do
    if charge.kind >= DAY then
      local from = window_of(charge.kind, hold[AT])
      change_kept(record_of(charge.key), charge.at, from, cost, 0)
    end
  end
end

-- Money of a lease that was granted while this store was away. Once only.
local function book_foreign(op, lease, cost)
  if #op < FOREIGN or not call('SET', base .. ':done:' .. lease, 1, 'NX', 'PX', LATE_MS) then
    return
  end
  for i = FOREIGN, #op, 2 do
    local from, at = window_of(op[i], now), BUDGETS[op[i]]
    local record = record_of(base .. ':' .. op[i + 1])
    -- One that is not here will come from the ledger, with this in it.
    if not has_ledger or is_kept(record, at, from) then
      change_budget(record, at, from, cost, 0)
    end
  end
end

local function settle(op)
  write_leases()
  local lease, cost = op[2], op[ACTUAL + COST]
  local hold = live_lease(lease)
  if hold then
    for _, charge in ipairs(hold.charges) do
      settle_charge(charge, lease, hold, op[ACTUAL + charge.measure])
    end
    call('HDEL', holds_key, lease)
    call('ZREM', live_key, lease)
    return 1
  end
  local late_key = base .. ':late:' .. lease
  local late = call('GET', late_key)
  if late then
    call('DEL', late_key)
    spend_late(late, cost)
  else
    book_foreign(op, lease, cost)
  end
  return 0
end

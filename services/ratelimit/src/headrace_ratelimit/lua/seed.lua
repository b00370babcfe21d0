-- Rebuilding budgets from the ledger. What is spent can only be raised: the ledger may lag behind.
-- Operation: SEED, a life for leases in microseconds, spends (kind, name, a time in the window, spent,
-- and so on), holds (lease id, its charges as in a set, admitted at, cost, and so
-- on).
-- Answer: by how much the largest difference was off before.
local function seed(op)
  local spends, holds, drift = op[3], op[4], 0
  for i = 1, #spends, 4 do
    local window = window_of(spends[i], spends[i + 2])
    local key = base .. ':' .. spends[i + 1] .. ':' .. window.name
    local missing = math.max(0, spends[i + 3] - budget_of(key).spent)
    drift = math.max(drift, missing)
    change_budget(key, missing, 0, window)
  end
  for i = 1, #holds, 4 do
    local lease = holds[i]
    if not live_lease(lease) and call('EXISTS', base .. ':late:' .. lease) == 0 then
      local at, cost = holds[i + 2], holds[i + 3]
      local packed = cmsgpack.pack(holds[i + 1])
      for _, charge in ipairs(set_of(packed)) do
        local key, window = key_of(charge, at)
        change_budget(key, 0, cost, window)
      end
      keep_lease(lease, packed, at, {0, 0, 0, 0, cost, 1}, REBUILT, now + op[2])
    end
  end
  call('SET', since_key, text(now), 'NX', 'PX', 400 * DAY_MS)
  return drift
end

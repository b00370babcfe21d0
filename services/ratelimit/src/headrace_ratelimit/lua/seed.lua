-- Rebuilding budgets from the ledger. What is spent can only be raised: the ledger may lag behind.
-- Operation: SEED, a life for leases in microseconds, spends (kind, scope, a time in the window,
-- spent, and so on), holds (lease id, its charges as in a set, admitted at, cost, and so on).
-- Answer: by how much the largest difference was off before.
local function raise(kind, record, from, spent)
  local at = BUDGETS[kind]
  -- A window that is over is asked for by nobody.
  if record[at + 2] > from then
    return 0
  end
  local missing = max(0, spent - (record[at + 2] == from and record[at] or 0))
  change_budget(record, at, from, missing, 0)
  return missing
end

local function seed(op)
  write_leases()
  local spends, holds, drift = op[3], op[4], 0
  for i = 1, #spends, 4 do
    local from, record = window_of(spends[i], spends[i + 2]), record_of(base .. ':' .. spends[i + 1])
    drift = max(drift, raise(spends[i], record, from, spends[i + 3]))
  end
  for i = 1, #holds, 4 do
    local lease = holds[i]
    if not live_lease(lease) and call('EXISTS', base .. ':late:' .. lease) == 0 then
      local at, cost = holds[i + 2], holds[i + 3]
      local packed = encode(holds[i + 1])
      for _, charge in ipairs(set_of(packed).charges) do
        local from = window_of(charge.kind, at)
        change_budget(record_of(charge.key), charge.at, from, 0, cost)
      end
      local hold = pack(HOLD, at, REBUILT, 0, 0, 0, 0, cost, 1)
      keep_lease(lease, hold .. packed, text(now + op[2]))
    end
  end
  call('SET', since_key, text(now), 'NX', 'PX', 400 * DAY_MS)
  return drift
end

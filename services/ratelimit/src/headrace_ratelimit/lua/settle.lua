-- Replaces a lease's reservation by what was used.
-- ARGV[2] lease id; ARGV[3..7] actual requests, input, output and all tokens, cost; then two per
-- budget (kind, name) to book the cost to if the lease is unknown here: it was granted without us.
-- Returns 1 if the lease was live, else 0.
local lease = ARGV[2]
local actual = {
  requests = tonumber(ARGV[3]),
  input = tonumber(ARGV[4]),
  output = tonumber(ARGV[5]),
  tokens = tonumber(ARGV[6]),
  cost = tonumber(ARGV[7]),
}

local function spend(charge)
  if is_budget(charge.kind) and redis.call('EXISTS', charge.key) == 1 then
    add(charge.key, 'spent', actual.cost)
  end
end

local function settle(charge)
  if charge.kind == 'slots' then
    redis.call('ZREM', charge.key, lease)
    return
  end
  local delta = actual[charge.measure] - charge.cost
  if charge.kind == 'rate' then
    move(charge.key, charge.limit, delta)
  elseif charge.kind == 'count' then
    if redis.call('EXISTS', charge.key) == 1 then
      redis.call('INCRBY', charge.key, text(delta))
    end
  elseif redis.call('EXISTS', charge.key) == 1 then
    add(charge.key, 'held', -charge.cost)
    add(charge.key, 'spent', actual.cost)
  end
end

-- Money of a lease that was granted while this store was away. Once only.
local function book_foreign()
  if #ARGV < 8 or not redis.call('SET', base .. ':done:' .. lease, 1, 'NX', 'PX', LATE_MS) then
    return
  end
  for i = 8, #ARGV, 2 do
    local window, reset = window_of(ARGV[i])
    local key = base .. ':' .. ARGV[i + 1] .. ':' .. window
    add(key, 'spent', actual.cost)
    if reset > 0 then
      redis.call('PEXPIRE', key, text(math.floor(reset / 1000) + 7 * DAY_MS))
    end
  end
end

sweep()
local charges = live_lease(lease)
if charges then
  for _, charge in ipairs(charges) do
    settle(charge)
  end
  redis.call('DEL', base .. ':lease:' .. lease)
  redis.call('ZREM', leases_key, lease)
  return 1
end
local late_key = base .. ':late:' .. lease
local late = redis.call('GET', late_key)
if late then
  redis.call('DEL', late_key)
  for _, charge in ipairs(cmsgpack.unpack(late)) do
    spend(charge)
  end
else
  book_foreign()
end
return 0

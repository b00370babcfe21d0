-- Extends live leases. ARGV[2] the new life in microseconds, then lease ids.
-- Returns the ids that are not live.
local expires = text(now + tonumber(ARGV[2]))
local unknown = {}

sweep()
for i = 3, #ARGV do
  local lease = ARGV[i]
  local charges = live_lease(lease)
  if charges then
    redis.call('ZADD', leases_key, 'XX', expires, lease)
    for _, charge in ipairs(charges) do
      if charge.kind == 'slots' then
        redis.call('ZADD', charge.key, 'XX', expires, lease)
        redis.call('PEXPIRE', charge.key, DAY_MS)
      end
    end
  else
    unknown[#unknown + 1] = lease
  end
end
return unknown

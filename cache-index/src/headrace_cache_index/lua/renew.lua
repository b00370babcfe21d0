-- Prolongs the lease of a connected publisher.
-- KEYS: registry, sets x3    ARGV: worker, incarnation, lease_ms, ttl_ms
local entry = read_entry(KEYS[1], ARGV[1])
if not entry then return {'LOST', 0} end
if entry.incarnation ~= ARGV[2] then return {'SUPERSEDED', entry.seq} end
for idx = 2, 4 do redis.call('PEXPIRE', KEYS[idx], ARGV[4]) end
entry.lease = now_ms() + tonumber(ARGV[3])
write_entry(KEYS[1], ARGV[1], entry)
return {'APPLIED', entry.seq}

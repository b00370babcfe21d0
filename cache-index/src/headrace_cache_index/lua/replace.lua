-- Puts a staged snapshot in the place of everything the replica held.
-- KEYS: registry, stream, sets x3, staged sets x3
-- ARGV: worker, incarnation, seq, lease_ms, ttl_ms, max_len, delta that tells mirrors to read again
local entry = read_entry(KEYS[1], ARGV[1])
if not entry then return {'LOST', 0} end
if entry.incarnation ~= ARGV[2] then return {'SUPERSEDED', entry.seq} end
for idx = 3, 5 do
  if redis.call('EXISTS', KEYS[idx + 3]) == 1 then
    redis.call('RENAME', KEYS[idx + 3], KEYS[idx])
    redis.call('PEXPIRE', KEYS[idx], ARGV[5])
  else
    redis.call('UNLINK', KEYS[idx])
  end
end
add_delta(KEYS[2], ARGV[6], ARGV[7])
entry.seq = tonumber(ARGV[3])
entry.lease = now_ms() + tonumber(ARGV[4])
write_entry(KEYS[1], ARGV[1], entry)
return {'APPLIED', entry.seq}

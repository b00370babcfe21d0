-- Applies one batch if it is the next one: sets, stream and registry change together or not at all.
-- KEYS: registry, stream, sets x3
-- ARGV: worker, incarnation, seq, lease_ms, ttl_ms, max_len, blocks of all replicas together at
--       most, cleared ('1' or '0'), delta for an overflow, added and removed (packed) per set x3, then the deltas
local entry = read_entry(KEYS[1], ARGV[1])
if not entry then return {'LOST', 0} end
if entry.incarnation ~= ARGV[2] then return {'SUPERSEDED', entry.seq} end
local seq = tonumber(ARGV[3])
if seq <= entry.seq then return {'APPLIED', entry.seq} end
if seq ~= entry.seq + 1 then return {'GAP', entry.seq} end

if ARGV[8] == '1' then redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5]) end
local held = 0
for idx = 0, 2 do
  local key = KEYS[3 + idx]
  change_set('SREM', key, ARGV[11 + 2 * idx])
  change_set('SADD', key, ARGV[10 + 2 * idx])
  held = held + redis.call('SCARD', key)
  redis.call('PEXPIRE', key, ARGV[5])
end
local status = 'APPLIED'
local share = math.floor(tonumber(ARGV[7]) / redis.call('HLEN', KEYS[1]))
if held > math.min(entry.capacity, share) then
  redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5])
  add_delta(KEYS[2], ARGV[6], ARGV[9])
  status = 'OVERFLOW'
else
  for idx = 16, #ARGV do add_delta(KEYS[2], ARGV[6], ARGV[idx]) end
end
entry.seq = seq
entry.lease = now_ms() + tonumber(ARGV[4])
write_entry(KEYS[1], ARGV[1], entry)
return {status, seq}

-- Makes an incarnation the live one of its worker and drops an older one.
-- KEYS: registry, stream, own sets x3, the older incarnation's sets x3
-- ARGV: worker, incarnation, model, capacity, lease_ms, max_len, expected older incarnation or '',
--       delta that says the older one is gone
local entry = read_entry(KEYS[1], ARGV[1])
if entry and entry.incarnation == ARGV[2] then
  entry.lease = now_ms() + tonumber(ARGV[5])
  write_entry(KEYS[1], ARGV[1], entry)
  return {'KNOWN', entry.seq}
end
if entry and entry.incarnation > ARGV[2] then return {'SUPERSEDED', entry.seq} end
if (entry and entry.incarnation or '') ~= ARGV[7] then return {'RETRY', 0} end
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5])
if entry then
  redis.call('UNLINK', KEYS[6], KEYS[7], KEYS[8])
  add_delta(KEYS[2], ARGV[6], ARGV[8])
end
write_entry(KEYS[1], ARGV[1], {incarnation = ARGV[2], seq = 0, model = ARGV[3],
  lease = now_ms() + tonumber(ARGV[5]), capacity = tonumber(ARGV[4])})
return {'NEW', 0}

-- Drops a replica whose lease has ended. Answers 1 if it did.
-- KEYS: registry, stream, sets x3    ARGV: worker, incarnation, max_len, delta
local entry = read_entry(KEYS[1], ARGV[1])
if not entry or entry.incarnation ~= ARGV[2] or entry.lease > now_ms() then return 0 end
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5])
redis.call('HDEL', KEYS[1], ARGV[1])
add_delta(KEYS[2], ARGV[3], ARGV[4])
return 1

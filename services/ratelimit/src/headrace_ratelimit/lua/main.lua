-- Last part: runs the operations in order.
local ADMIT, SETTLE, RENEW, SEED = 1, 2, 3, 4
local handlers = {[ADMIT] = admit, [SETTLE] = settle, [RENEW] = renew, [SEED] = seed}
local replies = {}

sweep()
for i, op in ipairs(cmsgpack.unpack(ARGV[3])) do
  replies[i] = handlers[op[1]](op)
end
write_back()
return replies

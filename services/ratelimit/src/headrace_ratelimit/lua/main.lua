-- Last part: runs the operations in order.
local ADMIT, SETTLE, RENEW, SEED = 1, 2, 3, 4
local HANDLERS = {[ADMIT] = admit, [SETTLE] = settle, [RENEW] = renew, [SEED] = seed}

local function begin(keys, args)
  if not floor then
    bind()
  end
  call = redis.call
  base = keys[1]
  live_key, holds_key, since_key = base .. ':live', base .. ':holds', base .. ':since'
  has_ledger = args[2] == '1'
  records, slots = {}, {}
  held_anew, num_new = {}, 0
  is_first_lease, has_renewed = false, false
  now = tonumber(args[1])
  if now == 0 then
    local time = call('TIME')
    local at = tonumber(time[1]) * 1000000 + tonumber(time[2])
    -- Set back a little, the clock stands until that time comes again. Nobody waits for more.
    if at > latest or latest - at > MINUTE_US then
      latest = at
    end
    now = latest
  end
  note_windows()
end

redis.register_function(LIBRARY, function(keys, args)
  begin(keys, args)
  sweep()
  local replies = {}
  for i, op in ipairs(decode(args[3])) do
    replies[i] = HANDLERS[op[1]](op, args)
  end
  write_leases()
  write_back()
  return replies
end)

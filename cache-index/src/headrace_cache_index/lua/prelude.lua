-- Put before every script. An entry of the registry is
-- "<incarnation, 20 digits>|<seq>|<lease, Unix ms>|<capacity, blocks>|<model>".

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function read_entry(registry, worker)
  local text = redis.call('HGET', registry, worker)
  if not text then return nil end
  local incarnation, seq, lease, capacity, model =
    string.match(text, '^(%d+)|(%d+)|(%d+)|(%d+)|(.*)$')
  return {incarnation = incarnation, seq = tonumber(seq), lease = tonumber(lease),
          capacity = tonumber(capacity), model = model}
end

local function write_entry(registry, worker, entry)
  redis.call('HSET', registry, worker, string.format('%s|%.0f|%.0f|%.0f|%s',
    entry.incarnation, entry.seq, entry.lease, entry.capacity, entry.model))
end

-- SADD or SREM of packed 8-byte members, 1,000 at a time (Lua's stack bounds unpack).
local function change_set(command, key, packed)
  for start = 1, #packed, 8000 do
    local members = {}
    for at = start, math.min(start + 7999, #packed), 8 do
      members[#members + 1] = string.sub(packed, at, at + 7)
    end
    redis.call(command, key, unpack(members))
  end
end

local function add_delta(stream, max_len, delta)
  redis.call('XADD', stream, 'MAXLEN', '~', max_len, '*', 'd', delta)
end

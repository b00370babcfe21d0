-- First part of the one function. A call serves a batch of operations of one tenant, in order and at
-- one moment. KEYS[1] is the tenant's base key "hr:rl:{tenant}"; every other key is made from it, so
-- the hash tag keeps all of them in one slot of a cluster.
-- args[1] the time in microseconds; 0 = the server's clock, which is what production sends.
-- args[2] '1': a budget that is not here may have been lost, and the ledger must be asked.
-- args[3] the operations (MessagePack). args[4..] sets of charges that they name by number: kind,
-- measure, limit, scope, and so on (MessagePack).
-- Numbers are doubles: every value stays a whole number below 2^53 (see limiter.py).
-- This text runs once, when the library is loaded; what is local to it lives on between calls.
-- `begin` sets what belongs to one call. An admission runs through some hundred lines for each of its
-- charges and is most of what this service costs: what is said twice here is said so for its time.
local RATE, COUNT, SLOTS, DAY, MONTH, TOTAL = 1, 2, 3, 4, 5, 6
local MINUTE_US, MAX_DEBT_US, DAY_US, POLL_US = 60000000, 60000000, 86400000000, 1000000
local ADMITTED, DENIED, TOO_LARGE, UNSEEDED = 1, 2, 3, 5
local NEVER = -1
-- Longest sweep in one call: the rest is left to the next.
local MAX_SWEEP = 64
-- Real time that a key outlives its use. Milliseconds.
local SLACK_MS, LATE_MS, DAY_MS = 60000, 600000, 86400000

-- The libraries are there when a call runs, not when this text is loaded: the first call binds them.
local floor, max, min, format, sub, rep, pack, unpack_of, encode, decode

local function bind()
  floor, max, min = math.floor, math.max, math.min
  format, sub, rep = string.format, string.sub, string.rep
  pack, unpack_of = struct.pack, struct.unpack
  encode, decode = cmsgpack.pack, cmsgpack.unpack
end

local call, base, live_key, holds_key, since_key, has_ledger, now
-- The latest time seen, which small steps back of the server's clock do not undo.
local latest = 0

-- Lua's own number format rounds to 14 digits; adding 0 turns -0 into 0.
local function text(number)
  return format('%.0f', number + 0)
end

-- Text of the time so many microseconds from now. Leases that begin together mostly end together.
local text_at, text_then = -1, ''

local function in_text(us)
  if now + us ~= text_at then
    text_at = now + us
    text_then = text(text_at)
  end
  return text_then
end

-- Floor division that is exact for whole a below 2^53 and b > 0: the quotient as a double may round up.
local function divmod(a, b)
  local quotient = floor(a / b)
  local rest = a - quotient * b
  if rest < 0 then
    return quotient - 1, rest + b
  end
  if rest >= b then
    return quotient + 1, rest - b
  end
  return quotient, rest
end

-- Year and month of a day number (Howard Hinnant, "chrono-compatible low-level date algorithms").
local function month_of(day)
  local z = day + 719468
  local era = floor(z / 146097)
  local doe = z - era * 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  local mp = floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return yoe + era * 400 + (month <= 2 and 1 or 0), month
end

local function first_day_of(year, month)
  local y = month <= 2 and year - 1 or year
  local era = floor(y / 400)
  local yoe = y - era * 400
  local doy = floor((153 * (month > 2 and month - 3 or month + 9) + 2) / 5)
  return era * 146097 + yoe * 365 + floor(yoe / 4) - floor(yoe / 100) + doy - 719468
end

local month_from, month_to = 0, 0

-- The window of *kind* that *at* lies in: its start and end. A total has one, from 1 to 0: it never
-- ends.
local function window_of(kind, at)
  if kind == TOTAL then
    return 1, 0
  end
  if kind ~= MONTH then
    local from = floor(at / DAY_US) * DAY_US
    return from, from + DAY_US
  end
  if at < month_from or at >= month_to then
    local year, month = month_of(floor(at / DAY_US))
    month_from = first_day_of(year, month) * DAY_US
    month_to = (month == 12 and first_day_of(year + 1, 1) or first_day_of(year, month + 1)) * DAY_US
  end
  return month_from, month_to
end

-- The windows that `now` lies in, by kind.
local from_now, to_now = {}, {}

local function note_windows()
  if not to_now[DAY] or now >= to_now[DAY] or now < from_now[DAY] then
    for _, kind in ipairs({COUNT, DAY, MONTH, TOTAL}) do
      from_now[kind], to_now[kind] = window_of(kind, now)
    end
  end
end

-- Renewal: extends live leases.
-- Operation: RENEW, the new life in microseconds, lease ids.
-- Answer: the ids that are not live, and those that the ledger brought back: whoever runs them should
-- say what else they hold.
local function renew(op)
  local expires, unknown = now + op[2], {}
  for _, lease in ipairs(op[3]) do
    local it = live_lease(lease)
    if it then
      has_renewed = true
      call('ZADD', leases_key, 'XX', text(expires), lease)
      for _, charge in ipairs(set_of(it[1])) do
        if charge.kind == SLOTS then
          call('ZADD', charge.key, 'XX', text(expires), lease)
          slots_of(charge.key).is_renewed = true
        end
      end
    end
    if not it or it[4] == REBUILT then
      unknown[#unknown + 1] = lease
    end
  end
  return unknown
end

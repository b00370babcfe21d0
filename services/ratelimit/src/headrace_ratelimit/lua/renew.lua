-- Renewal: extends live leases.
-- Operation: RENEW, the new life in microseconds, lease ids.
-- Answer: the ids that are not live, and those that the ledger brought back: whoever runs them should
-- say what else they hold.
local function renew(op)
  write_leases()
  local expires, unknown = text(now + op[2]), {}
  for _, lease in ipairs(op[3]) do
    local hold = live_lease(lease)
    if hold then
      has_renewed = true
      call('ZADD', live_key, 'XX', expires, lease)
      for _, charge in ipairs(hold.charges) do
        if charge.kind == SLOTS then
          call('ZADD', charge.key, 'XX', expires, lease)
          slots_of(charge.key).is_renewed = true
        end
      end
    end
    if not hold or hold[STATE] == REBUILT then
      unknown[#unknown + 1] = lease
    end
  end
  return unknown
end

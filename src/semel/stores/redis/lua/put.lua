-- ARGV: owner, outcome, ttl (ms)

local owner = ARGV[1]
local now = clock()
local old = read()
if old then
  if old.owner == owner and old.state == SUCCEEDED then return 1 end  -- sent twice
  if ended_for_good(old) then return 0 end
  if old.state == PROCESSING and (old.hold or old.lease_until > now) then return 0 end
  write_when_full()
end
write_ended({
  state = SUCCEEDED, owner = owner, hold = false, retryable = false,
  number = old and old.number + 1 or 1,
  fence = next_fence(old, now),
  created = old and old.created or math.floor(now / 1000),
  waited_for = 0,  -- who waited for an abandoned attempt has asked again when its lease ended
  fingerprint = '', superseded = old and old.superseded or '',
}, ARGV[2], tonumber(ARGV[3]), now)
return 1

-- ARGV: owner, lease (us). Gives an abandoned attempt, held or not, to a resolver.

local owner = ARGV[1]
local now = clock()
local record = read()
if not record or record.state ~= PROCESSING then return nil end
if record.owner ~= owner then
  if record.lease_until > now then return nil end
  record.owner = owner
  record.fence = next_fence(record, now)
end
write_when_full()
write_running(record, tonumber(ARGV[2]), now)
return {'adopted', redis.call('GET', KEYS[1]), -1, now}  -- PROCESSING: as in check.lua

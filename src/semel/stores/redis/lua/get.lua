-- Answers the raw record, when it expires (ms) and the time (us); nil when there is none.

local raw = redis.call('GET', KEYS[1])
if not raw then return nil end
local now = clock()
return {raw, expiry(now), now}

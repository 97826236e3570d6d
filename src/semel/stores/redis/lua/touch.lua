-- ARGV: ttl (ms)

local record = read()
if not record or record.state == PROCESSING then return 0 end
-- PEXPIRE with nothing left to live deletes the key, which is what "keep for 0" means.
return redis.call('PEXPIRE', KEYS[1], ARGV[1])

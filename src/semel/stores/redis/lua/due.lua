-- KEYS[1]: the index of one bucket. ARGV: older than (us), limit
-- Answers members and deadlines of leases that ended at least that long ago, oldest first.

local latest = clock() - tonumber(ARGV[1])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', digits(latest), 'WITHSCORES', 'LIMIT', 0, ARGV[2])

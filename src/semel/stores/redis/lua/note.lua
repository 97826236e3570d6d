-- KEYS[1]: an index alone. ARGV: member, lease (us; '' = the attempt has ended)
-- Writes the entry of a record whose own script had to go without its index.

local known = redis.call('ZREM', KEYS[1], ARGV[1])  -- first: see write_when_full
if ARGV[2] == '' then return known end
return redis.call('ZADD', KEYS[1], digits(clock() + tonumber(ARGV[2])), ARGV[1])

-- KEYS[1]: an index alone. ARGV: member, lease (us; '' = the attempt has ended)
-- Writes the entry of a record whose own script had to go without its index.

if ARGV[2] == '' then return redis.call('ZREM', KEYS[1], ARGV[1]) end
return redis.call('ZADD', KEYS[1], digits(clock() + tonumber(ARGV[2])), ARGV[1])

-- Removes whatever is there, readable or not: this is also the way out of a damaged record.

local raw = redis.pcall('GET', KEYS[1])
local flags = type(raw) == 'string' and string.byte(raw, 2)
if flags and bit.band(flags, WAITED_FOR) ~= 0 then wake() end
index_remove()
return redis.call('DEL', KEYS[1])

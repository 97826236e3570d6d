-- Removes what is older than the fence, and keeps it out for a while: a late write finds the mark.
-- A fence above all removes whatever is there, readable or not.
-- ARGV: fence, life (ms)

local fence, life = tonumber(ARGV[1]), tonumber(ARGV[2])
if fence == ABOVE_ALL and KEYS[2] then
  -- Not the same again within one microsecond.
  set_generation(math.max(clock(), (tonumber(redis.call('GET', KEYS[2])) or 0) + 1))
end
if fence < ABOVE_ALL and stored_is_newer(fence, CLOSED) then return 0 end
write(CLOSED, fence, clock() + life * 1000, '', life)
return 1

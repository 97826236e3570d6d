-- Writes what SQL said when it was asked, unless that is old by now or something newer is here.
-- ARGV: kind, fence, asked (us, this server's clock), valid (us from then), window (us),
--       longest (ms), body, generation
--
-- Two tests of age. Outside the window the command was late, or the client's idea of this clock is
-- of another server; and nothing outlives the word of SQL, counted from before SQL was asked.

local kind, fence = tonumber(ARGV[1]), tonumber(ARGV[2])
local now = clock()
local age = now - tonumber(ARGV[3])
local left = tonumber(ARGV[4]) - age
if age < 0 or age > tonumber(ARGV[5]) or left <= 0 then return 0 end
if not KEYS[2] or redis.call('GET', KEYS[2]) ~= ARGV[8] then return 0 end
if stored_is_newer(fence, kind) then return 0 end
write(kind, fence, now + left, ARGV[7], math.min(math.ceil(left / 1000), tonumber(ARGV[6])))
return 1

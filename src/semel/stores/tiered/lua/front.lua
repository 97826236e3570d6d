-- An entry of the front and its clock: put in front of every script.
--
-- KEYS[1] is the entry of one key. KEYS[2] is the generation of its bucket, a number that every
-- forgetting there changes. What SQL said is written only if the generation is still the one that was
-- found before SQL was asked: so a forgetting holds even if its mark is evicted or flushed, because
-- then the generation is gone, too, or is another one. KEYS[2] is left out while a cluster moves the
-- slot (see the scripts of the Redis store): then nothing is copied.
--
--   bytes  field      meaning
--   1      version    1
--   1      kind       0 hint, 1 closed, 2 succeeded, 3 failed for good
--   7      fence      of the attempt it tells of; 0 = not known
--   7      expires    microseconds on this server's clock, when SQL's word ends
--   ...    body       packed by the client and never looked at here
--
-- Entries go forward only: a higher fence first, then a higher kind. All numbers are big-endian.

local VERSION, CLOSED = 1, 1
local ABOVE_ALL = 9007199254740991  -- the largest number that Lua knows exactly

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Redis formats large numbers in scientific notation in some versions; this never does.
local function digits(number) return string.format('%.0f', number) end

-- Whether what is stored is newer; an entry of another version is left to those who can read it.
local function stored_is_newer(fence, kind)
  local raw = redis.call('GET', KEYS[1])
  if not raw then return false end
  if #raw < 16 or string.byte(raw, 1) ~= VERSION then return true end
  local _, stored_kind, stored_fence = struct.unpack('>BBI7', raw)
  return stored_fence > fence or (stored_fence == fence and stored_kind > kind)
end

local GENERATION_LIFE = 86400000  -- milliseconds; a new one costs a few copies

local function set_generation(number)
  local generation = digits(number)
  -- A full server may refuse it: then nothing is copied.
  redis.pcall('SET', KEYS[2], generation, 'PX', GENERATION_LIFE)
  return generation
end

local function generation()
  if not KEYS[2] then return '' end
  return redis.call('GET', KEYS[2]) or set_generation(clock())
end

local function write(kind, fence, expires, body, milliseconds)
  local entry = struct.pack('>BBI7I7', VERSION, kind, fence, expires) .. body
  redis.call('SET', KEYS[1], entry, 'PX', digits(milliseconds))
end

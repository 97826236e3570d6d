-- The record and its clock: put in front of every script that judges one record.
--
-- KEYS[1] is the record, KEYS[2] the index of running leases of its bucket. KEYS[2] may be left
-- out: while a cluster moves the slot, a script with two keys is refused (TRYAGAIN), so the record
-- goes alone and its index entry follows by note.lua.
--
--   bytes  field        meaning
--   1      version      1
--   1      flags        bits 0-1 state, 4 hold, 8 retryable, 16 fingerprint present,
--                       32 somebody waits: set by a claim that is answered busy, kept until the end
--   1      superseded   how many replaced fingerprints follow, 0 to 8
--   4      number       counts claims
--   7      fence        microseconds or previous + 1
--   6      created_at   milliseconds
--   6      updated_at   milliseconds
--   12     owner
--   16     fingerprint  only if its flag is set
--   16 n   superseded   oldest first
--   then, while PROCESSING:
--   7      lease_until  microseconds
--   6      keep         milliseconds that the key outlives its lease, so that renew can set it again
--   1      length       of run_info; a claim without one ends the record here
--   ...    run_info     who runs the attempt; packed by the client and never looked at here
--   ...    unknown      what a newer release keeps of the attempt: left as it is while that runs
--   then, when ended:
--   ...    outcome      codec and data, packed by the client and never looked at here; before a
--                       large one may be filling: 254, its whole length in one byte, and zeros
--
-- All numbers are big-endian. The time of expiry is the key's own and is not stored.

local VERSION, HEADER = 1, 38
local PROCESSING, SUCCEEDED, FAILED = 0, 1, 2
local HOLD, RETRYABLE, FINGERPRINT, WAITED_FOR = 4, 8, 16, 32
local SUPERSEDED_LIMIT = 8

-- Redis formats large numbers in scientific notation in some versions; this never does.
local function digits(number) return string.format('%.0f', number) end

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function unreadable(why) error('SEMEL<' .. why .. '>', 0) end

local function parse(raw)
  local version = string.byte(raw, 1)
  if version ~= VERSION then
    unreadable(version and 'unknown record version ' .. version or 'empty record')
  end
  if #raw < HEADER then unreadable('record cut short') end
  local record = {}
  local _, flags, replaced
  _, flags, replaced, record.number, record.fence, record.created, record.updated, record.owner =
    struct.unpack('>BBBI4I7I6I6c12', raw)
  record.state = bit.band(flags, 3)
  if record.state > FAILED then unreadable('unknown state') end
  if replaced > SUPERSEDED_LIMIT then unreadable('too many replaced fingerprints') end
  record.hold = bit.band(flags, HOLD) ~= 0
  record.retryable = bit.band(flags, RETRYABLE) ~= 0
  record.waited_for = bit.band(flags, WAITED_FOR)
  local offset = HEADER
  record.fingerprint = ''
  if bit.band(flags, FINGERPRINT) ~= 0 then
    record.fingerprint = string.sub(raw, offset + 1, offset + 16)
    offset = offset + 16
  end
  record.superseded = string.sub(raw, offset + 1, offset + 16 * replaced)
  offset = offset + 16 * replaced
  if record.state == PROCESSING then
    if #raw < offset + 13 then unreadable('record cut short') end
    record.lease_until, record.keep = struct.unpack('>I7I6', raw, offset + 1)
    record.rest = string.sub(raw, offset + 14)  -- run_info with its length, and what is unknown
  elseif #raw <= offset then
    unreadable('record cut short')
  end
  return record
end

local function read()
  local raw = redis.call('GET', KEYS[1])
  if raw then return parse(raw), raw end
end

-- When the key expires, in milliseconds; -1 = never. Redis 6.2 knows only how long that is from now.
local function expiry(now)
  local at = redis.pcall('PEXPIRETIME', KEYS[1])
  if type(at) == 'number' then return at end
  local left = redis.call('PTTL', KEYS[1])
  return left < 0 and left or math.floor(now / 1000) + left
end

local function pack(record, tail)
  local flags = record.state + record.waited_for
  if record.hold then flags = flags + HOLD end
  if record.retryable then flags = flags + RETRYABLE end
  if record.fingerprint ~= '' then flags = flags + FINGERPRINT end
  return struct.pack('>BBBI4I7I6I6', VERSION, flags, #record.superseded / 16, record.number,
    record.fence, record.created, record.updated)
    .. record.owner .. record.fingerprint .. record.superseded .. tail
end

-- The index member is the record key without prefix and bucket; a prefix has no braces.
local function member() return string.sub(KEYS[1], string.find(KEYS[1], '}', 1, true) + 1) end

local function index_add(record)
  if KEYS[2] then redis.call('ZADD', KEYS[2], digits(record.lease_until), member()) end
end

local function index_remove()
  if KEYS[2] then redis.call('ZREM', KEYS[2], member()) end
end

-- A full server refuses the first write of a script if that may take memory; when the first one
-- cannot, it refuses none. So every script that changes an existing record begins with such a
-- write: what was admitted is renewed, ended and decided on a full server, too. New keys are refused.
local function write_when_full()
  if KEYS[2] then
    redis.call('ZREM', KEYS[2], '')  -- no record has this name
  else
    redis.call('PEXPIRE', KEYS[1], 86400000)  -- the write that follows sets it anew
  end
end

local function write_running(record, lease, now)
  record.lease_until = now + lease
  record.updated = math.floor(now / 1000)
  local tail = struct.pack('>I7I6', record.lease_until, record.keep) .. record.rest
  local packed = pack(record, tail)
  if record.hold then
    redis.call('SET', KEYS[1], packed)  -- nobody but a resolver may end it, so it never expires
  else
    local outlives = math.max(1, record.keep + math.ceil(lease / 1000))
    redis.call('SET', KEYS[1], packed, 'PX', digits(outlives))
  end
  index_add(record)
end

-- Lets those who wait for the record ask again; its key is also the name of their channel. It may
-- fail, for lack of permission or of shard channels (Redis 6.2): then they ask by themselves.
local function wake()
  local sent = redis.pcall('SPUBLISH', KEYS[1], '')
  if type(sent) == 'table' then redis.pcall('PUBLISH', KEYS[1], '') end
end

local function write_ended(record, outcome, ttl, now)
  record.updated = math.floor(now / 1000)
  local waited_for = record.waited_for
  record.waited_for = 0
  if ttl > 0 then
    redis.call('SET', KEYS[1], pack(record, outcome), 'PX', digits(ttl))
  else
    redis.call('DEL', KEYS[1])  -- kept for no time at all
  end
  index_remove()
  if waited_for ~= 0 then wake() end
end

local function next_fence(record, now)
  return math.max(record and record.fence + 1 or 0, now)
end

local function ended_for_good(record)
  return record.state == SUCCEEDED or (record.state == FAILED and not record.retryable)
end

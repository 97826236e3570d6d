-- ARGV: owner, lease (us); 0 parks the attempt: abandoned from now on, below 0: that long ago

local now = clock()
local record = read()
if not record or record.state ~= PROCESSING or record.owner ~= ARGV[1] then return 0 end
local lease = tonumber(ARGV[2])
write_when_full()
write_running(record, lease, now)
if lease <= 0 and record.waited_for ~= 0 then wake('') end
return 1

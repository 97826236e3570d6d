-- ARGV: owner, lease (us); 0 parks the attempt: abandoned from now on, below 0: that long ago

local now = clock()
local record = read()
if not record or record.state ~= PROCESSING or record.owner ~= ARGV[1] then return 0 end
write_running(record, tonumber(ARGV[2]), now)
return 1

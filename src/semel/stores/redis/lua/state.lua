-- Answers the record's state, 3 when it is abandoned, nil when there is none.

local record = read()
if not record then return nil end
if record.state == PROCESSING and record.lease_until <= clock() then return 3 end
return record.state

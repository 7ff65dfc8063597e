-- List the requests that the newest results belong to.
--
-- KEYS[1]  results  stream
-- ARGV     number of results to read, a multiple of ten
--
-- Replies  for each result, newest first: entry id, request id

local found, last = {}, '+'
for _ = 1, ARGV[1] / 10 do
  local page = redis.call('XREVRANGE', KEYS[1], last, '-', 'COUNT', 10)  -- results may be large
  for _, entry in ipairs(page) do
    for i = 1, #entry[2], 2 do
      if entry[2][i] == 'key' then table.insert(found, {entry[1], entry[2][i + 1]}) end
    end
    last = '(' .. entry[1]
  end
  if #page < 10 then break end
end
return found

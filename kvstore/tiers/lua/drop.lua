-- Blocks are out of the index, leased or not. The caller has deleted them before.
--
-- ARGV     budget, keep, then keys
--
-- Replies  how many were in the index
--
-- Crash    before: the entries are forgotten by the first who does not find their blocks.

local count = 0
for i = 3, #ARGV do count = count + drop(ARGV[i]) end
save()
return count

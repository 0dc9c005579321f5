/* What the device's answer to a chain of work requests means; the call itself is in submit.h. */
#include "posting/submit.h"

#define BEGINS(type)                                                            \
	(offsetof(type, wr_id) == offsetof(struct link, wr_id) &&               \
	 offsetof(type, next) == offsetof(struct link, next))
_Static_assert(BEGINS(struct ibv_send_wr) && BEGINS(struct ibv_recv_wr) &&
		       BEGINS(struct ibv_ops_wr),
	       "work requests begin with something else");

/*
 * Providers return a positive errno, a negative one (siw), or 0 with *bad set
 * (a partial post); on some paths *bad is left alone, or points outside the
 * chain. So *bad starts as NULL and counts only if the chain contains it.
 */
struct outcome rp_outcome_of(int code, const struct link *chain, const void *bad, size_t count)
{
	int64_t posted = 0;

	while (chain && chain != bad) {
		chain = chain->next;
		posted++;
	}
	if (!code && (!bad || !chain))
		return (struct outcome){ 0, (int64_t)count };
	code = code ? abs(code) : EIO;
	if (!bad || !chain)
		/* An unsupported call posts nothing; any other failed call may have posted some. */
		posted = code == EOPNOTSUPP || code == ENOSYS ? 0 : -1;
	return (struct outcome){ code, posted };
}

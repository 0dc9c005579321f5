/* The end of a handle's use, and the closes that were deferred until then. */
#ifndef RDMAPOST_CLOSE_H
#define RDMAPOST_CLOSE_H

#include "handles/handle.h"

/*
 * End a use; a thread ends its uses in reverse order. Ending the outermost one runs
 * the closes that finalizers and signal handlers deferred. They may run any Python
 * code, so hold no lock; an exception already set stays set.
 */
void rp_end_use(struct rp_use *use);

/* If this was an unreachable handle's last user, close the handle. */
void rp_user_left(struct rp_handle *handle);
/* Run this thread's deferred closes. */
void rp_run_deferred(void);

/* Unreachable queue pairs that wait for their windows; see handles/close.c. */
RP_SHARED struct rp_handle *rp_held_back;

/* Run the deferred closes, unless this thread is in the middle of a verb or a constructor. */
static inline void rp_run_deferred_if_idle(struct rp_thread *me)
{
	if (!me->top && (me->first_deferred || RP_LOAD(&rp_held_back)) && !me->draining &&
	    !me->making)
		rp_run_deferred();
}

static inline void rp_pop_use(struct rp_thread *me, const struct rp_use *use)
{
	me->top = use->below;
	rp_run_deferred_if_idle(me);
}

static inline void rp_end_use_by(struct rp_thread *me, struct rp_use *use)
{
	struct rp_handle *handle = use->handle;

	/* The use is popped afterwards, so no deferred close runs before the count is right. */
	if (handle->process == me->mark >> 32) {
		RP_ADD(&handle->word, -1);
		if (RP_LOAD(&handle->abandoned))
			rp_user_left(handle);
	}
	rp_pop_use(me, use);
}

/*
 * Undo rp_pin(). The caller still holds a reference. Like dropping the last reference, this may run
 * any Python code.
 */
void rp_unpin(struct rp_handle *handle);

#endif

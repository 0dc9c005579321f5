/*
 * The regions that memory windows are bound to: each window holds those that it may be bound to,
 * according to the binds and invalidations that were posted and have completed.
 */
#ifndef RDMAPOST_WINDOWS_H
#define RDMAPOST_WINDOWS_H

#include "handles/handle.h"

/* The next number in the order of binds: each post and each completion of a bind takes one. */
uint64_t rp_bind_clock(void);

/* A bind that has been posted. */
struct rp_bind {
	struct rp_binder *binder; /* of its send queue */
	uint64_t serial; /* when it was posted, by rp_bind_clock() */
	uint32_t number; /* number of binds under this key so far, including this one */
	unsigned char key; /* the low byte of the window's new key */
};

/*
 * A bind has completed. If it succeeded (`sure`), the window releases the regions bound earlier;
 * queues are not ordered with respect to each other, so another queue's bind is earlier only if it
 * had completed when this one was posted. The window now also references `mr`, unless NULL. Both
 * handles are pinned (rp_pin). May run any Python code.
 */
void rp_note_bound(struct rp_handle *mw, struct rp_handle *mr, int sure, struct rp_bind bind);

/* Count a bind that is about to be posted; return its number for the key, or 0 for type 1. */
uint32_t rp_number_bind(struct rp_handle *mw, unsigned char key, const struct rp_binder *binder);

/* Take back a bind that was not posted, or has failed. */
void rp_take_back_bind(struct rp_handle *mw, unsigned char key, uint32_t number);

/* Count the invalidation of a key in its window's counts (may be NULL). Runs no Python code. */
void rp_count_invalidation(PyObject *all, unsigned char key);

#endif

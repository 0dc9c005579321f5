/*
 * What is posted to a queue and not known to be done.
 *
 * A device gives back only the wr_id of a work request, and in an error
 * completion not even which queue it was on.  So it gets a ticket of ours as
 * wr_id, the queue's number and a count, and the caller's wr_id comes back
 * from the queue's records.  These also hold the memory, windows and address
 * handles that a work request names, until it is known to be done.
 */
#ifndef RDMAPOST_INFLIGHT_H
#define RDMAPOST_INFLIGHT_H

#include "handle.h"

struct rp_in_flight;

/*
 * Return a new reference to the queue that a ticket belongs to, or NULL, without an
 * exception.  `queues` is a dict of them by number (Context._queues).
 */
struct rp_in_flight *rp_find_queue(PyObject *queues, uint64_t ticket);

/*
 * Retire a work request and, where the queue completes in order, all before it.
 * Returns a new reference to the caller's wr_id, or NULL without an exception
 * where the ticket is not outstanding.  Runs no code of Python's: what is
 * retired is let go of by rp_drop_done(), which may run any.
 */
PyObject *rp_complete(struct rp_in_flight *q, uint64_t ticket);
void rp_drop_done(struct rp_in_flight *q);

/* A message has matched this tagged receive, and its data will follow. */
void rp_match(struct rp_in_flight *q, uint64_t ticket);

#endif

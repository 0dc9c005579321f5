/*
 * The path that every post takes.
 *
 * 1. read     the caller's objects once, into numbers and references that we own;
 * 2. check    those, by the rules of rules.c;
 * 3. record   them as in flight, with everything that they name;
 * 4. submit   the device's struct, made from those numbers;
 * 5. take back the work requests that were not posted, and have Python say why.
 *
 * The caller's code (__index__, an iterator, a property, a finalizer) can run only
 * in step 1 and after step 5.
 */
#ifndef RDMAPOST_POST_H
#define RDMAPOST_POST_H

#include "handles/close.h"
#include "posting/inflight.h"
#include "posting/read_wr.h"
#include "posting/submit.h"

RP_SHARED PyObject *rp_queue_type;

/* The queue of a queue pair or SRQ to which a verb posts; NULL with an exception. */
struct work_queue *rp_queue_of(PyObject *owner, int verb);

/* Check that a queue is initialised and its owner's; 0, or -1 with an exception. */
int rp_check_owner(const struct work_queue *q, PyObject *owner);

/*
 * Set the pointers in a device's struct: to its SGEs, to the next struct, and to the resources that
 * it names.
 */
void rp_link(const struct post *post, size_t index, size_t count);

/*
 * Post a prepared list; `*sent`, a struct rp_sent, holds the wr_ids and references that the post
 * carries, and is NULL once the list is closed. Returns None, or NULL with an exception.
 */
PyObject *rp_post_list(struct work_queue *q, struct rp_handle *owner, struct post *post,
		       PyObject *const *sent);

/* Have Python raise a PostError or, if `posted` is -1, a TypeError or ValueError; returns NULL. */
PyObject *rp_raise_refusal(struct work_queue *q, struct rp_handle *owner, PyObject *wrs,
			   const struct refusal *why, size_t index, Py_ssize_t posted);
void rp_raise_list_closed(const struct post *post);

/* Begin to use the queue's owner, and acquire the queue's lock; 0, or -1 with an exception. */
struct rp_posting {
	struct rp_thread *me;
	struct rp_use use;
};
static inline int rp_begin_post(struct work_queue *q, struct rp_handle *owner,
				struct rp_posting *posting)
{
	posting->me = rp_thread();
	if (rp_begin_use_by(posting->me, owner, &posting->use)) {
		rp_raise_closed(owner);
		return -1;
	}
	if (rp_try_acquire(&q->lock, posting->me) || !rp_acquire(&q->lock))
		return 0;
	rp_end_use(&posting->use);
	return -1;
}

/*
 * Release the queue's lock; if `taken`, let the device execute the work requests that it accepted;
 * then end the use. The caller's code may run only after this. `post` has the requests to unpin, or
 * is NULL for a prepared list, which stays pinned. Returns a signal handler's exception, or NULL.
 */
static inline PyObject *rp_run_and_end_post(struct work_queue *q, struct rp_posting *posting,
					    struct post *post, int taken)
{
	PyObject *raised;

	rp_release(&q->lock);
	raised = taken ? rp_run_device() : NULL;
	if (post)
		rp_unpin_requests(post);
	rp_end_use_by(posting->me, &posting->use);
	return raised;
}

/* End a post that posts nothing. */
static inline void rp_end_post(struct work_queue *q, struct rp_posting *posting)
{
	rp_release(&q->lock);
	rp_end_use_by(posting->me, &posting->use);
}

/* Hand the device a chain of a queue's work requests. */
struct outcome rp_submit(const struct work_queue *q, void *object, void *records, size_t count);

/* How many more work requests the queue accepts; the caller must hold its lock. */
uint64_t rp_room(const struct work_queue *q);

/*
 * Return a new reference to `result`, or NULL with an exception: `raised`, if not NULL, with any
 * exception already set as its context; otherwise the one already set. A note on the exception says
 * how many of `count` work requests were posted.
 */
PyObject *rp_answer(PyObject *result, PyObject *raised, int64_t posted, size_t count);

#endif

/*
 * What the files of the soft device share.
 *
 * Its rules are written in Python (rdmapost/soft/), and a signal handler may raise between any two
 * bytecodes.  So each change to the device's state is noted before it is made, with the call that
 * takes it back, and what cannot be taken back waits for the end: C, in which no handler runs,
 * then makes these calls (soft_journal.c) or those.
 *
 * A verb holds the device's lock from its first step to its last, and all below is used under it.
 */
#ifndef RDMAPOST_SOFT_DEVICE_H
#define RDMAPOST_SOFT_DEVICE_H

#include "handle.h"

#include "soft.h"

/* ---- soft_journal.c ------------------------------------------------------ */

/* The names of attributes and methods that C looks up. */
enum rp_name { SQ, RQ, QUEUE, OPS, ENTRIES, ARMED, APPEND, POPLEFT, NAMES };
extern PyObject *rp_names[NAMES];

/* Make a call, which is a tuple of a callable and its arguments; NULL if it raised. */
PyObject *rp_call(PyObject *call);
/* Put an item at the end of a list or a deque; 0, or -1 without an exception. */
int rp_append(PyObject *queue, PyObject *item);
void rp_clear(PyObject *list);

/* Begin to note changes; keep them all; take all of them back, and keep the exception that is set. */
void rp_journal_begin(void);
void rp_journal_commit(void);
void rp_journal_rollback(void);
/* After a fork: forget what was noted. */
void rp_journal_forget(void);

/* How many items a deque has at its end that may still be taken back. */
Py_ssize_t rp_journal_count(PyObject *deque);

/* The tp_setattro of types whose attributes are journaled. */
int rp_journaled_setattr(PyObject *self, PyObject *name, PyObject *value);

/* ---- soft_queue.c: work queues ------------------------------------------- */

struct work_queue {
	PyObject_HEAD
	PyObject *pending; /* a deque: the work requests that are not done */
	PyObject *faults; /* of sends: (a call, a dict), to be made where the dict is not empty */
	PyObject *slots; /* of operations: the work queue of the list's entries */
	unsigned int depth, max_sge, max_inline, max_tso_header;
	unsigned int used; /* slots */
	unsigned int incoming; /* slots of what waits for a verb to end */
	unsigned int silent;
	unsigned int last_handle; /* of the entries in a matching list */
	int refuses; /* the errno of every post, or 0 */
	int prompt; /* what is posted is to be carried out, not to wait for a message */
};

extern PyTypeObject *rp_work_queue_type;

/* Put a WQE where it takes its slots; 0 or an errno. */
int rp_queue_accept(struct work_queue *queue, PyObject *wqe);
/* Count a WQE as one that is accepted later, or (-1) as one that no longer is. */
void rp_queue_expect(struct work_queue *queue, PyObject *wqe, unsigned int count);

int rp_soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int rp_soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
int rp_soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
			  struct ibv_recv_wr **bad_wr);
int rp_soft_post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad_op);

/* ---- soft_verb.c: the lock, and what runs under it ----------------------- */

/*
 * Begin a verb, with what is due by now.  Returns 1 if this thread is in the middle of another one:
 * the verb then neither waits nor changes anything but through rp_soft_settle and rp_soft_start.
 */
int rp_soft_enter(void);
/* End it, when what has become possible by it has been carried out. */
void rp_soft_leave(int nested);

/* Whether an exception of a signal handler's is about to be raised in this thread. */
int rp_soft_raises(void);

/* A part of what a handle stands for, as a new reference; NULL where there is none. */
PyObject *rp_soft_part(uint32_t handle, enum rp_name name);

/*
 * Make a call as one step that no signal handler ends.  Returns the number that it returned, or 0
 * where the device failed.
 */
long rp_soft_step(PyObject *call);

/*
 * Accept a WQE for a work queue; or, without one, free `count` slots of it, or arm a completion
 * queue.  In the middle of a verb that waits for its end.  Returns 0 or an errno.
 */
enum { RP_NOT_ARMED, RP_ARMED_SOLICITED, RP_ARMED_NEXT };
int rp_soft_settle(int nested, PyObject *target, PyObject *wqe, unsigned int count);
/* Let the device carry out what the object of a handle has to do. */
void rp_soft_start(uint32_t handle);

#endif

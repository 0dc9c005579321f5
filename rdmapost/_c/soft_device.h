/*
 * What the files of the soft device share.
 *
 * Its rules are written in Python (rdmapost/soft/), and a signal handler may
 * raise between any two bytecodes.  So Python only computes: every change that
 * it makes to the device's state is journaled, copies to memory and writes to
 * descriptors wait, and C commits all of it, in which no handler runs, or takes
 * all of it back.
 *
 * A verb of the soft device holds the device's lock from its first step to its
 * last, and all below is used under that lock.
 */
#ifndef RDMAPOST_SOFT_DEVICE_H
#define RDMAPOST_SOFT_DEVICE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "soft.h"

/* ---- soft_journal.c: changes that can be taken back --------------------- */

/* A queue of references. */
struct fifo {
	PyObject_HEAD
	PyObject **items; /* a ring */
	size_t room, head, count;
};

extern PyTypeObject *rp_fifo_type;

/* At the tail, not journaled; 0, or -1 with an exception. */
int rp_fifo_push(struct fifo *fifo, PyObject *item);
/* A new reference, from the head, not journaled; NULL where there is none. */
PyObject *rp_fifo_pop(struct fifo *fifo);

void rp_journal_begin(void);
void rp_journal_commit(void);
/* Also keeps the exception that is set. */
void rp_journal_rollback(void);
/* After a fork: forget all, and touch nothing. */
void rp_journal_abandon(void);

/* The tp_setattro of types whose attributes are journaled. */
int rp_journaled_setattr(PyObject *self, PyObject *name, PyObject *value);

struct completion_ring;
/* Note that entries are added; 0, 1 where there is no journal, or -1 with an exception. */
int rp_journal_ring(PyObject *ring);

/* ---- soft_queue.c: work queues and completion queues -------------------- */

struct work_queue {
	struct fifo pending; /* work requests that are not done */
	unsigned int depth, max_sge, max_inline, max_tso_header;
	unsigned int used; /* slots */
	unsigned int incoming; /* slots of what waits for a verb to end */
	unsigned int silent;
	unsigned int last_handle; /* of the entries in a matching list */
	int refuses; /* the errno of every post, or 0 */
	int prompt; /* what is posted is to be carried out, not to wait for a message */
	PyObject *faults; /* of sends: the plan of what is to go wrong, or NULL */
};

struct cq_entry {
	struct ibv_wc wc;
	struct ibv_wc_tm_info tm;
	struct work_queue *queue; /* owned: whose slots it frees */
	unsigned int frees;
};

struct completion_ring {
	PyObject_HEAD
	struct cq_entry *entries;
	size_t room;
	uint64_t head, tail; /* what can be polled */
	uint64_t end; /* behind what the verb that runs has added */
	unsigned int capacity;
	int armed;
};

extern PyTypeObject *rp_work_queue_type, *rp_completion_ring_type;

/* Keep what has been added since the last commit, or drop it. */
void rp_ring_commit(struct completion_ring *ring);
void rp_ring_rollback(struct completion_ring *ring);
/* Drop the entries of a work queue. */
void rp_ring_forget(struct completion_ring *ring, PyObject *queue);
/* Take the entry at the head; its slots are the caller's to free.  0 if there is none. */
int rp_ring_take(struct completion_ring *ring, struct cq_entry *entry);

/*
 * Read a work request into an object.  Returns a new reference, or NULL with an
 * errno in *code.  `queue` is where it goes.
 */
PyObject *rp_read_send(const struct work_queue *queue, enum ibv_qp_type type,
		       const struct ibv_send_wr *wr, int *code);
PyObject *rp_read_recv(const struct work_queue *queue,
		       const struct ibv_recv_wr *wr, int *code);
/* TAG_ADD takes one of the `slots` and sets op->tm.handle; TAG_DEL must name one it has given. */
PyObject *rp_read_op(struct work_queue *slots, struct ibv_ops_wr *op,
		     int *code);

/* ---- soft_verb.c: the lock, and what runs under it ---------------------- */

/*
 * Begin a verb, with what is due by now.  Returns 1 if this thread is in the middle of another one: the
 * verb then neither waits nor changes anything but through the calls below.
 */
int rp_soft_enter(void);
/* End it, when what has become possible by it has been carried out. */
void rp_soft_leave(int nested);

/* Whether an exception of a signal handler's is about to be raised in this thread. */
int rp_soft_raises(void);

/* What a handle stands for, as a new reference, or NULL. */
PyObject *rp_soft_object(uint32_t handle);

/* An attribute of that type, as a new reference, or NULL without an exception. */
void *rp_soft_part(PyObject *object, const char *name, PyTypeObject *type);

/* Call as one step that no signal handler ends; NULL if it failed. */
PyObject *rp_soft_step(PyObject *callable);

/* These take effect when no verb of this thread is in the middle of something. */
int rp_soft_accept(int nested, struct work_queue *queue,
		   struct work_queue *slots, PyObject *wqe);
void rp_soft_free_slots(int nested, struct work_queue *queue,
			unsigned int count);
enum { RP_NOT_ARMED, RP_ARMED_SOLICITED, RP_ARMED_NEXT };
void rp_soft_arm(int nested, struct completion_ring *ring, int how);
/* Let the device carry out what an object (a queue pair, say) has to do. */
void rp_soft_start(int nested, PyObject *owner);

#endif

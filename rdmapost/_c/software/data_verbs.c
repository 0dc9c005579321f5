/*
 * The soft device's data verbs: a context with our own operations.
 *
 * ibv_post_send() and the like (libibverbs/shim.c) call through qp->context->ops, so a context
 * created here receives exactly what a NIC's driver would. Such a context must never be passed to
 * exported libibverbs functions: they access private data that it lacks.
 *
 * Work requests are copied in full here, and executed in Python, or in fast_path.c.
 */
#include "software/device_queues.h"

#include <structmember.h>

/* ---- work requests ------------------------------------------------------- */

enum posts { SENDS, RECEIVES, SRQ_RECEIVES, OPERATIONS };

PyObject *rp_wqe_type;

#define MEMBER(type, code, name, field) { #name, code, offsetof(struct type, field), 0, NULL }
#define OBJECT(name, field) MEMBER(wqe, T_OBJECT, name, field)
#define U64(name, field) MEMBER(wqe, T_ULONGLONG, name, field)
#define U32(name, field) MEMBER(wqe, T_UINT, name, field)

static PyMemberDef wqe_members[] = {
	OBJECT(inline, data), OBJECT(hdr, hdr), OBJECT(ah, ah),
	OBJECT(window, window), OBJECT(region, region), OBJECT(owner, owner),
	U32(opcode, opcode), U32(flags, flags), U64(wr_id, wr.send.wr_id),
	U32(imm, wr.send.imm_data), U64(remote_addr, wr.send.wr.rdma.remote_addr),
	U32(rkey, wr.send.wr.rdma.rkey), U32(atomic_rkey, wr.send.wr.atomic.rkey),
	U64(compare_add, wr.send.wr.atomic.compare_add), U64(swap, wr.send.wr.atomic.swap),
	U32(remote_qpn, wr.send.wr.ud.remote_qpn), U32(remote_qkey, wr.send.wr.ud.remote_qkey),
	U32(remote_srqn, wr.send.qp_type.xrc.remote_srqn), U32(mss, wr.send.tso.mss),
	U32(length, wr.built.length), U64(atomic_wr, wr.built.atomic_wr), U32(type, wr.built.type),
	U32(level, wr.built.level),
	U32(bind_rkey, wr.send.bind_mw.rkey), U64(bind_addr, wr.send.bind_mw.bind_info.addr),
	U64(bind_length, wr.send.bind_mw.bind_info.length),
	U32(bind_access, wr.send.bind_mw.bind_info.mw_access_flags),
	U32(handle, wr.op.tm.handle), U32(unexpected_cnt, wr.op.tm.unexpected_cnt),
	U64(recv_wr_id, wr.op.tm.add.recv_wr_id), U64(tag, wr.op.tm.add.tag),
	U64(mask, wr.op.tm.add.mask),
	{ NULL, 0, 0, 0, NULL },
};

/* Release the objects that an object's members refer to, and free it. */
static void release(PyObject *self, const PyMemberDef *member)
{
	for (; member->name; member++)
		if (member->type == T_OBJECT)
			Py_XDECREF(*(PyObject **)(void *)((char *)self + member->offset));
	rp_free(self);
}

#define WQE(self) ((struct wqe *)(self))

static void wqe_dealloc(PyObject *self)
{
	Py_XDECREF(WQE(self)->sges);
	release(self, wqe_members);
}

/* Return a new tuple of (addr, length, lkey). */
static PyObject *make_sges(const struct ibv_sge *sge, unsigned int count)
{
	PyObject *list = PyList_New(0), *sges;

	for (unsigned int i = 0; list && i < count; i++)
		if (rp_append_new(list, Py_BuildValue("(KII)", (unsigned long long)sge[i].addr,
						      (unsigned int)sge[i].length,
						      (unsigned int)sge[i].lkey)))
			Py_CLEAR(list);
	sges = list ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return sges;
}

static PyObject *wqe_get_sges(PyObject *self, void *unused)
{
	struct wqe *wqe = WQE(self);

	(void)unused;
	return wqe->num_sge > RP_MAX_SGES ? Py_XNewRef(wqe->sges) :
					    make_sges(wqe->sge, wqe->num_sge);
}

static int wqe_set_sges(PyObject *self, PyObject *sges, void *unused)
{
	PyObject *old = WQE(self)->sges;

	(void)unused;
	if (!sges) {
		PyErr_SetString(PyExc_AttributeError, "sges cannot be deleted");
		return -1;
	}
	WQE(self)->sges = Py_XNewRef(sges);
	WQE(self)->num_sge = RP_MAX_SGES + 1;
	Py_XDECREF(old);
	return 0;
}

static PyGetSetDef wqe_getset[] = {
	{ "sges", wqe_get_sges, wqe_set_sges, NULL, NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot wqe_slots[] = {
	{ Py_tp_dealloc, wqe_dealloc },
	{ Py_tp_members, wqe_members },
	{ Py_tp_getset, wqe_getset },
	{ 0, NULL },
};

/* ---- queues -------------------------------------------------------------- */

enum { ARMED_SOLICITED = 1, ARMED_NEXT };

PyObject *rp_device_queue_type;

#define NUMBER(name) MEMBER(device_queue, T_UINT, name, name)
#define REFERENCE(name) MEMBER(device_queue, T_OBJECT, name, name)

static PyMemberDef queue_members[] = {
	NUMBER(armed), NUMBER(depth), NUMBER(max_sge), NUMBER(max_inline), NUMBER(max_tso_header),
	NUMBER(used), NUMBER(silent), NUMBER(refuses), NUMBER(prompt), REFERENCE(pending),
	REFERENCE(faults), REFERENCE(slots), REFERENCE(fast_path), { NULL, 0, 0, 0, NULL },
};

static void queue_dealloc(PyObject *self)
{
	release(self, queue_members);
}

static int queue_setattr(PyObject *self, PyObject *name, PyObject *value)
{
	int failed;

	rp_data_lock();
	failed = rp_journaled_setattr(self, name, value);
	rp_data_unlock();
	return failed;
}

/* Return a new reference to a queue of the object with this handle, or NULL if it has none. */
static struct device_queue *find_queue(uint32_t handle, enum rp_name name)
{
	PyObject *found = rp_soft_part(handle, name);

	if (found && !PyObject_TypeCheck(found, (PyTypeObject *)rp_device_queue_type))
		Py_CLEAR(found);
	return (struct device_queue *)found;
}

static int is_full(const struct device_queue *queue)
{
	return queue->used >= queue->depth;
}

/* free_slot(), for on_commit. */
static PyObject *queue_free_slot(PyObject *self, PyObject *unused)
{
	(void)unused;
	rp_data_lock();
	QUEUE(self)->used--;
	rp_data_unlock();
	Py_RETURN_NONE;
}

/* posted(): return the queue's contents as a tuple. */
static PyObject *queue_posted(PyObject *self, PyObject *unused)
{
	PyObject *posted;

	(void)unused;
	rp_data_lock();
	posted = PySequence_Tuple(QUEUE(self)->pending);
	rp_data_unlock();
	return posted;
}

/* empty(), for on_commit: empty the queue and free its slots. */
static PyObject *queue_empty(PyObject *self, PyObject *unused)
{
	PyObject *item;

	(void)unused;
	do {
		rp_data_lock();
		/* An empty deque raises. */
		item = PyObject_CallMethodObjArgs(QUEUE(self)->pending, rp_names[POPLEFT], NULL);
		if (!item)
			QUEUE(self)->used = 0;
		rp_data_unlock();
		/* Nothing is deallocated under the lock. */
		Py_XDECREF(item);
	} while (item);
	PyErr_Clear();
	Py_RETURN_NONE;
}

/* resize(depth): set the number of slots; returns False if more are in use. */
static PyObject *queue_resize(PyObject *self, PyObject *depth)
{
	unsigned int wanted = (unsigned int)PyLong_AsUnsignedLong(depth);
	int fits, failed;

	if (PyErr_Occurred())
		return NULL;
	rp_data_lock();
	fits = QUEUE(self)->used <= wanted;
	failed = fits && rp_journaled_setattr(self, rp_names[DEPTH], depth);
	rp_data_unlock();
	return failed ? NULL : PyBool_FromLong(fits);
}

/* ---- completion queue entries -------------------------------------------- */

/* Remove the last entry, to undo soft_add(). */
static PyObject *withdraw(PyObject *self, PyObject *cq)
{
	PyObject *entry;

	(void)self;
	rp_data_lock();
	entry = rp_withdraw(QUEUE(cq));
	rp_data_unlock();
	return entry;
}

static PyMethodDef withdraw_method = { "withdraw", withdraw, METH_O, NULL };
static PyObject *withdraws;

/*
 * add(cq, entry): append an entry; polls see it once it is committed. As a method, it would need
 * more stack, and the failure for lack of stack would look like one for lack of memory.
 */
static PyObject *soft_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	int failed, hides = rp_is_journaled();
	struct device_queue *cq;

	(void)self;
	if (nargs != 2 || !PyObject_TypeCheck(args[0], (PyTypeObject *)rp_device_queue_type))
		return PyErr_Format(PyExc_TypeError, "add(cq, entry)");
	cq = QUEUE(args[0]);
	if (hides && !cq->hidden && rp_note_added(args[0]))
		return NULL;
	if (rp_note_undo(withdraws, args[0]))
		return NULL;
	rp_data_lock();
	failed = hides ? rp_append_hidden(cq, args[1]) : rp_append(cq->pending, args[1]);
	rp_data_unlock();
	if (failed)
		rp_note_unchanged();
	return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

void rp_announce(struct device_queue *cq, PyObject *events, int fd, int solicited)
{
	rp_data_lock();
	/* If memory runs out, the CQ stays armed: a later completion announces this one, too. */
	if ((cq->armed == ARMED_NEXT || (cq->armed && solicited)) &&
	    !rp_append(events, (PyObject *)cq)) {
		cq->armed = 0;
		eventfd_write(fd, 1);
	}
	rp_data_unlock();
}

/* announce(events, fd, solicited): rp_announce(), for at_the_end. */
static PyObject *queue_announce(PyObject *self, PyObject *args)
{
	PyObject *events;
	int fd, solicited;

	if (!PyArg_ParseTuple(args, "Oip", &events, &fd, &solicited))
		return NULL;
	rp_announce(QUEUE(self), events, fd, solicited);
	Py_RETURN_NONE;
}

static PyMethodDef queue_methods[] = {
	{ "free_slot", queue_free_slot, METH_NOARGS, NULL },
	{ "posted", queue_posted, METH_NOARGS, NULL },
	{ "empty", queue_empty, METH_NOARGS, NULL },
	{ "resize", queue_resize, METH_O, NULL },
	{ "announce", queue_announce, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot queue_slots[] = {
	{ Py_tp_setattro, queue_setattr },
	{ Py_tp_members, queue_members },
	{ Py_tp_methods, queue_methods },
	{ Py_tp_dealloc, queue_dealloc },
	{ 0, NULL },
};

/* ---- reading: these return 0 or an errno --------------------------------- */

static int read_sges(struct wqe *wqe, const struct ibv_sge *sge, int count, unsigned int max)
{
	/* A negative count converts to a huge one. */
	if ((unsigned int)count > max || (count && !sge))
		return EINVAL;
	wqe->num_sge = (unsigned int)count;
	if (wqe->num_sge <= RP_MAX_SGES) {
		for (int i = 0; i < count; i++)
			wqe->sge[i] = sge[i];
		return 0;
	}
	wqe->num_sge = RP_MAX_SGES + 1;
	wqe->sges = make_sges(sge, (unsigned int)count);
	return wqe->sges ? 0 : ENOMEM;
}

static int read_inline(struct wqe *wqe, const struct ibv_send_wr *wr, unsigned int max)
{
	uint64_t size = 0;
	char *to;
	int code = 0;

	for (int i = 0; i < wr->num_sge; i++)
		size += wr->sg_list[i].length;
	if (size > max)
		return EINVAL;
	wqe->data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	if (!wqe->data)
		return ENOMEM;
	to = PyBytes_AsString(wqe->data);
	for (int i = 0; !code && i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];

		code = rp_soft_read(to, sge->addr, sge->length);
		to += sge->length;
	}
	return code;
}

static int read_send(struct wqe *wqe, const struct device_queue *queue, enum ibv_qp_type type,
		     const struct ibv_send_wr *wr)
{
	int code = read_sges(wqe, wr->sg_list, wr->num_sge, queue->max_sge);

	wqe->opcode = wr->opcode;
	wqe->flags = wr->send_flags;
	if (!code && wr->send_flags & IBV_SEND_INLINE)
		code = read_inline(wqe, wr, queue->max_inline);
	if (code)
		return code;
	if (wr->opcode == IBV_WR_BIND_MW) {
		if (!wr->bind_mw.mw || !wr->bind_mw.bind_info.mr)
			return EINVAL;
		wqe->window = rp_soft_part(wr->bind_mw.mw->handle, NAMES);
		wqe->region = rp_soft_part(wr->bind_mw.bind_info.mr->handle, NAMES);
		return wqe->window && wqe->region ? 0 : EINVAL;
	}
	if (type == IBV_QPT_UD && (wr->opcode == IBV_WR_SEND || wr->opcode == IBV_WR_TSO ||
				   wr->opcode == IBV_WR_SEND_WITH_IMM)) {
		wqe->ah = wr->wr.ud.ah ? rp_soft_part(wr->wr.ud.ah->handle, NAMES) : NULL;
		if (!wqe->ah)
			return EINVAL;
	}
	if (wr->opcode == IBV_WR_TSO) {
		if (wr->tso.hdr_sz > queue->max_tso_header || (wr->tso.hdr_sz && !wr->tso.hdr))
			return EINVAL;
		wqe->hdr = PyBytes_FromStringAndSize(wr->tso.hdr, wr->tso.hdr_sz);
		if (!wqe->hdr)
			return ENOMEM;
	}
	return 0;
}

/* TAG_ADD uses one of the list's slots and sets tm.handle; TAG_DEL must name such a handle. */
static int read_op(struct wqe *wqe, const struct device_queue *queue, struct ibv_ops_wr *op)
{
	struct device_queue *list = QUEUE(queue->slots);
	int adds = op->opcode == IBV_WR_TAG_ADD, code;

	wqe->opcode = op->opcode;
	wqe->flags = (unsigned int)op->flags;
	if (!list || !PyObject_TypeCheck((PyObject *)list, (PyTypeObject *)rp_device_queue_type))
		return EINVAL;
	if (adds && is_full(list))
		return ENOMEM;
	if (op->opcode == IBV_WR_TAG_DEL ? !op->tm.handle || op->tm.handle > list->last_handle :
					   !adds && op->opcode != IBV_WR_TAG_SYNC)
		return EINVAL;
	code = read_sges(wqe, op->tm.add.sg_list, adds ? op->tm.add.num_sge : 0, list->max_sge);
	if (adds && !code)
		wqe->wr.op.tm.handle = op->tm.handle = ++list->last_handle;
	return code;
}

/* ---- posting ------------------------------------------------------------- */

/* Queue a WQE and occupy its slots; 0 or an errno. */
static int put_in(struct device_queue *queue, struct wqe *wqe, int adds)
{
	if (rp_append(queue->pending, (PyObject *)wqe))
		return ENOMEM;
	queue->used++;
	/* An operation that adds an entry also occupies a slot in the matching list. */
	if (adds)
		QUEUE(queue->slots)->used++;
	return 0;
}

/* Create a WQE, or return NULL with an errno in *code, for instance if the queue is full. */
static struct wqe *new_wqe(const struct device_queue *queue, int *code)
{
	struct wqe *wqe;

	*code = rp_take_fault(queue->faults);
	if (!*code)
		*code = (int)queue->refuses;
	if (!*code && is_full(queue))
		*code = ENOMEM;
	if (*code)
		return NULL;
	wqe = (struct wqe *)PyType_GenericAlloc((PyTypeObject *)rp_wqe_type, 0);
	if (!wqe)
		*code = ENOMEM;
	PyErr_Clear();
	return wqe;
}

/* Accept one work request; 0 or an errno. */
static int accept_wr(enum posts what, enum ibv_qp_type type, struct device_queue *queue, void *wr)
{
	static const size_t sizes[] = { sizeof(struct ibv_send_wr), sizeof(struct ibv_recv_wr),
					sizeof(struct ibv_recv_wr), sizeof(struct ibv_ops_wr) };
	struct ibv_recv_wr *recv = wr;
	int code;
	struct wqe *wqe = new_wqe(queue, &code);

	if (!wqe)
		return code;
	memcpy(&wqe->wr, wr, sizes[what]);
	if (what == SENDS)
		code = read_send(wqe, queue, type, wr);
	else if (what == OPERATIONS)
		code = read_op(wqe, queue, wr);
	else
		code = read_sges(wqe, recv->sg_list, recv->num_sge, queue->max_sge);
	PyErr_Clear();
	if (!code)
		code = put_in(queue, wqe, what == OPERATIONS && wqe->opcode == IBV_WR_TAG_ADD);
	Py_DECREF((PyObject *)wqe);
	return code;
}

/*
 * A post is accepted without the device's lock, even in the middle of a verb. No Python code may
 * run while a post is being accepted, so that the device gets the posts in the order in which they
 * were recorded. The collector is therefore disabled, and re-enabled before any other code runs.
 * (Without a GIL, the collector does not run in the middle of C code, and the data lock keeps other
 * threads out.)
 */
struct quiet {
	PyGILState_STATE gil;
	int collects;
};

static struct quiet begin_quietly(void)
{
	struct quiet quiet = { .gil = PyGILState_Ensure() };

#ifndef Py_GIL_DISABLED
	quiet.collects = PyGC_Disable();
#endif
	return quiet;
}

static void end_quietly(struct quiet quiet)
{
	if (quiet.collects)
		PyGC_Enable();
	PyGILState_Release(quiet.gil);
}

/*
 * Returns 0, or an errno with the first refused work request in *bad. If bad is NULL, either all
 * work requests are accepted or none.
 */
static int post(enum posts what, uint32_t handle, enum ibv_qp_type type, void *wr, void **bad)
{
	static const enum rp_name names[] = { SQ, RQ, SRQ_QUEUE, OPS };
	struct quiet quiet = begin_quietly();
	struct device_queue *queue = find_queue(handle, names[what]);
	int code = queue ? 0 : EINVAL, accepted = 0;

	rp_data_lock();
	/* The work runs after the post, and is harmless if nothing was accepted. */
	if (queue && queue->prompt)
		code = rp_soft_start(handle);
	while (wr && !code) {
		code = accept_wr(what, type, queue, wr);
		/* All three structs have `next` at the same offset. */
		if (!code)
			wr = ((struct ibv_recv_wr *)wr)->next;
		accepted += !code;
	}
	for (; code && !bad && accepted; accepted--) {
		Py_XDECREF(PyObject_CallMethodObjArgs(queue->pending, rp_names[POP_LAST], NULL));
		queue->used--;
	}
	rp_data_unlock();
	Py_XDECREF((PyObject *)queue);
	end_quietly(quiet);
	if (code && bad)
		*bad = wr;
	return code;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	return post(SENDS, qp->handle, qp->qp_type, wr, (void **)bad_wr);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return post(RECEIVES, qp->handle, 0, wr, (void **)bad_wr);
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return post(SRQ_RECEIVES, srq->handle, 0, wr, (void **)bad_wr);
}

static int post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad_op)
{
	return post(OPERATIONS, srq->handle, 0, op, (void **)bad_op);
}

/* A type 1 window gets a new rkey at once. */
static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct ibv_send_wr wr = { .wr_id = bind->wr_id, .opcode = IBV_WR_BIND_MW,
				  .send_flags = bind->send_flags };
	struct quiet quiet = begin_quietly();
	int code;

	wr.bind_mw.mw = mw;
	wr.bind_mw.bind_info = bind->bind_info;
	/* No other bind may read the rkey until this one has changed it. */
	rp_data_lock();
	wr.bind_mw.rkey = (mw->rkey & ~0xFFu) | ((mw->rkey + 1) & 0xFF);
	code = post(SENDS, qp->handle, qp->qp_type, &wr, NULL);
	if (!code)
		mw->rkey = wr.bind_mw.rkey;
	rp_data_unlock();
	end_quietly(quiet);
	return code;
}

/* ---- polling ------------------------------------------------------------ */

/*
 * A CQ entry is a tuple (bytes, work queue, number of slots it frees). The bytes are a struct ibv_wc
 * and a struct rp_wc_ex, which ends after the tag if the CQ has no timestamps.
 */
static void read_entry(PyObject *bytes, struct ibv_wc *wc, struct rp_wc_ex *more)
{
	const char *data = PyBytes_AsString(bytes);

	memcpy(wc, data, sizeof(*wc));
	if (more)
		memcpy(more, data + sizeof(*wc), (size_t)PyBytes_Size(bytes) - sizeof(*wc));
}

/* Whether an object is a CQ entry: Python code may find the deque through gc and add anything. */
static int is_entry(PyObject *object)
{
	PyObject *bytes;
	size_t size;

	if (!PyTuple_CheckExact(object) || PyTuple_Size(object) != 3 ||
	    !PyObject_TypeCheck(PyTuple_GetItem(object, 1), (PyTypeObject *)rp_device_queue_type) ||
	    !PyLong_CheckExact(PyTuple_GetItem(object, 2)))
		return 0;
	bytes = PyTuple_GetItem(object, 0);
	size = PyBytes_CheckExact(bytes) ? (size_t)PyBytes_Size(bytes) : 0;
	return size >= sizeof(struct ibv_wc) &&
	       size <= sizeof(struct ibv_wc) + sizeof(struct rp_wc_ex);
}

/* Count the completions that no verb in progress may still roll back. */
static Py_ssize_t count_entries(const struct device_queue *cq)
{
	/* Read `hidden` first: without the lock, the count may be too high, but never too low. */
	Py_ssize_t hidden = RP_LOAD(&cq->hidden);

	return PyObject_Size(cq->pending) - hidden;
}

/* Dequeue up to `max` completions; `more` may be NULL; -1 for an unknown CQ. */
static int poll(uint32_t handle, int max, struct ibv_wc *wc, struct rp_wc_ex *more)
{
	struct quiet quiet = begin_quietly();
	struct device_queue *cq = find_queue(handle, NAMES);
	int count = 0;

	if (!cq)
		max = 0;
	while (count < max) {
		PyObject *taken = NULL;
		int valid;

		rp_data_lock();
		if (count_entries(cq) > 0)
			taken = PyObject_CallMethodObjArgs(cq->pending, rp_names[POPLEFT], NULL);
		valid = taken && is_entry(taken);
		if (valid)
			QUEUE(PyTuple_GetItem(taken, 1))->used -=
				(unsigned int)PyLong_AsLong(PyTuple_GetItem(taken, 2));
		rp_data_unlock();
		if (!taken)
			break;
		if (valid) {
			read_entry(PyTuple_GetItem(taken, 0), wc + count, more ? more + count : NULL);
			count++;
		}
		Py_DECREF(taken);
	}
	PyErr_Clear();
	Py_XDECREF((PyObject *)cq);
	end_quietly(quiet);
	if (cq)
		return count;
	errno = EINVAL;
	return -1;
}

static int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	return poll(cq->handle, num_entries, wc, NULL);
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	struct quiet quiet = begin_quietly();
	struct device_queue *found = find_queue(cq->handle, NAMES);
	unsigned int how = solicited_only ? ARMED_SOLICITED : ARMED_NEXT;

	rp_data_lock();
	/* A solicited-only request does not replace an earlier one that any entry satisfies. */
	if (found && how > found->armed)
		found->armed = how;
	rp_data_unlock();
	Py_XDECREF((PyObject *)found);
	end_quietly(quiet);
	return found ? 0 : EINVAL;
}

/* ---- a context ---------------------------------------------------------- */

struct ibv_context *rp_soft_context_init(struct verbs_context *whole)
{
	struct ibv_context *context = &whole->context;

	rp_progress = rp_soft_progress;
	whole->sz = sizeof(*whole);
	whole->post_srq_ops = post_srq_ops;
	context->abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->cmd_fd = context->async_fd = -1;
	context->num_comp_vectors = 1;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->ops.bind_mw = bind_mw;
	return context;
}

/* ---- an extended CQ ----------------------------------------------------- */

static struct rp_soft_cq_ex *to_soft(struct ibv_cq_ex *cq)
{
	return (struct rp_soft_cq_ex *)(void *)cq;
}

static int next_poll(struct ibv_cq_ex *cq)
{
	struct rp_soft_cq_ex *soft = to_soft(cq);
	int n = poll(ibv_cq_ex_to_cq(cq)->handle, 1, &soft->wc, &soft->more);

	if (n <= 0)
		return n ? EINVAL : ENOENT;
	cq->wr_id = soft->wc.wr_id;
	cq->status = soft->wc.status;
	return 0;
}

static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	return attr && attr->comp_mask ? EINVAL : next_poll(cq);
}

static void end_poll(struct ibv_cq_ex *cq)
{
	(void)cq;
}

#define FIELDS(X)                                                                                \
	X(enum ibv_wc_opcode, opcode)                                                             \
	X(uint32_t, vendor_err)                                                                   \
	X(uint32_t, byte_len)                                                                     \
	X(__be32, imm_data)                                                                       \
	X(uint32_t, qp_num)                                                                       \
	X(uint32_t, src_qp)                                                                       \
	X(unsigned int, wc_flags)                                                                 \
	X(uint32_t, slid)                                                                         \
	X(uint8_t, sl)                                                                            \
	X(uint8_t, dlid_path_bits)
#define READ(type, field)                                                                         \
	static type read_##field(struct ibv_cq_ex *cq)                                            \
	{                                                                                         \
		return to_soft(cq)->wc.field;                                                     \
	}
#define SET(type, field) cq->cq.read_##field = read_##field;
FIELDS(READ)

static void read_tm_info(struct ibv_cq_ex *cq, struct ibv_wc_tm_info *tm_info)
{
	*tm_info = to_soft(cq)->more.tm;
}

static uint64_t read_completion_ts(struct ibv_cq_ex *cq)
{
	return to_soft(cq)->more.completion_ts;
}

static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *cq)
{
	return to_soft(cq)->more.completion_wallclock_ns;
}

void rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq, uint64_t wc_flags)
{
	cq->cq.start_poll = start_poll;
	cq->cq.next_poll = next_poll;
	cq->cq.end_poll = end_poll;
	FIELDS(SET)
	if (wc_flags & IBV_WC_EX_WITH_TM_INFO)
		cq->cq.read_tm_info = read_tm_info;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
		cq->cq.read_completion_ts = read_completion_ts;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
		cq->cq.read_completion_wallclock_ns = read_completion_wallclock_ns;
}

/* ---- a queue pair with send_ops_flags ------------------------------------ */

static void wr_start(struct ibv_qp_ex *qp)
{
	struct rp_soft_qp_ex *soft = (void *)qp;

	soft->first = soft->last = NULL;
	soft->code = 0;
}

/* Add a work request; NULL if out of memory. */
static struct rp_built_wr *add_wr(struct ibv_qp_ex *qp, int opcode, uint32_t rkey,
				  uint64_t remote_addr)
{
	struct rp_soft_qp_ex *soft = (void *)qp;
	struct ibv_send_wr *wr = calloc(1, sizeof(*wr));

	if (!wr) {
		soft->code = ENOMEM;
		return NULL;
	}
	wr->wr_id = qp->wr_id;
	wr->opcode = (enum ibv_wr_opcode)opcode;
	wr->send_flags = qp->wr_flags;
	wr->wr.rdma.remote_addr = remote_addr;
	wr->wr.rdma.rkey = rkey;
	*(soft->last ? &soft->last->next : &soft->first) = wr;
	soft->last = wr;
	return (void *)wr;
}

static void wr_atomic_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr,
			    const void *atomic_wr)
{
	struct rp_built_wr *wr = add_wr(qp, RP_WR_ATOMIC_WRITE, rkey, remote_addr);

	if (wr)
		memcpy(&wr->atomic_wr, atomic_wr, 8);
}

static void wr_flush(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len,
		     uint8_t type, uint8_t level)
{
	struct rp_built_wr *wr = add_wr(qp, RP_WR_FLUSH, rkey, remote_addr);

	if (!wr)
		return;
	wr->length = (uint32_t)len;
	wr->type = type;
	wr->level = level;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *qp, uint32_t remote_srqn)
{
	struct rp_soft_qp_ex *soft = (void *)qp;

	if (soft->last)
		soft->last->qp_type.xrc.remote_srqn = remote_srqn;
}

static int wr_complete(struct ibv_qp_ex *qp)
{
	struct rp_soft_qp_ex *soft = (void *)qp;
	int code = soft->code ? soft->code :
		   post(SENDS, soft->qp.handle, soft->qp.qp_type, soft->first, NULL);

	while (soft->first) {
		struct ibv_send_wr *next = soft->first->next;

		free(soft->first);
		soft->first = next;
	}
	return code;
}

struct ibv_qp *rp_soft_qp_ex_init(struct rp_soft_qp_ex *qp)
{
	struct ibv_qp_ex *ex = (void *)qp;

	ex->wr_start = wr_start;
	ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
	ex->wr_complete = wr_complete;
	qp->ex.wr_atomic_write = wr_atomic_write;
	qp->ex.wr_flush = wr_flush;
	return &qp->qp;
}

static PyMethodDef functions[] = {
	RP_METHOD_NAMED("add", soft_add),
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_data_verbs(PyObject *module)
{
	withdraws = PyCFunction_New(&withdraw_method, NULL); /* never released */
	return !withdraws ||
	       rp_add_type(module, "rdmapost._verbs.WQE", sizeof(struct wqe), 0, wqe_slots,
			   &rp_wqe_type) ||
	       rp_add_type(module, "rdmapost._verbs.DeviceQueue", sizeof(struct device_queue),
			   Py_TPFLAGS_BASETYPE, queue_slots, &rp_device_queue_type) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}

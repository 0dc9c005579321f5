/*
 * The soft device's work queues, as far as posts reach: work requests are taken in here, whole, and
 * carried out in Python.
 */
#include "soft_device.h"

#include <string.h>
#include <structmember.h>

/* ---- work requests ------------------------------------------------------- */

enum posts { SENDS, RECEIVES, SRQ_RECEIVES, OPERATIONS };

/* A work request as the device holds it. */
struct wqe {
	PyObject_HEAD
	union {
		struct ibv_send_wr send;
		struct ibv_recv_wr recv;
		struct ibv_ops_wr op;
	} wr; /* as it was posted; its pointers lead nowhere any more */
	unsigned int opcode, flags; /* of a send or an operation */
	PyObject *sges; /* a tuple of (addr, length, lkey) */
	PyObject *data, *hdr; /* bytes that were copied at the post, or NULL */
	PyObject *ah, *window, *region; /* what handles stood for then, or NULL */
	PyObject *owner;
};

static PyTypeObject *wqe_type;

#define MEMBER(type, kind, name, field) { #name, kind, offsetof(struct type, field), 0, NULL }
#define OBJECT(name, field) MEMBER(wqe, T_OBJECT, name, field)
#define U64(name, field) MEMBER(wqe, T_ULONGLONG, name, field)
#define U32(name, field) MEMBER(wqe, T_UINT, name, field)

static PyMemberDef wqe_members[] = {
	OBJECT(sges, sges), OBJECT(inline, data), OBJECT(hdr, hdr), OBJECT(ah, ah),
	OBJECT(window, window), OBJECT(region, region), OBJECT(owner, owner),
	U32(opcode, opcode), U32(flags, flags), U64(wr_id, wr.send.wr_id),
	U32(imm, wr.send.imm_data), U64(remote_addr, wr.send.wr.rdma.remote_addr),
	U32(rkey, wr.send.wr.rdma.rkey), U32(atomic_rkey, wr.send.wr.atomic.rkey),
	U64(compare_add, wr.send.wr.atomic.compare_add), U64(swap, wr.send.wr.atomic.swap),
	U32(remote_qpn, wr.send.wr.ud.remote_qpn), U32(remote_qkey, wr.send.wr.ud.remote_qkey),
	U32(remote_srqn, wr.send.qp_type.xrc.remote_srqn), U32(mss, wr.send.tso.mss),
	U32(bind_rkey, wr.send.bind_mw.rkey), U64(bind_addr, wr.send.bind_mw.bind_info.addr),
	U64(bind_length, wr.send.bind_mw.bind_info.length),
	U32(bind_access, wr.send.bind_mw.bind_info.mw_access_flags),
	U32(handle, wr.op.tm.handle), U32(unexpected_cnt, wr.op.tm.unexpected_cnt),
	U64(recv_wr_id, wr.op.tm.add.recv_wr_id), U64(tag, wr.op.tm.add.tag),
	U64(mask, wr.op.tm.add.mask),
	{ NULL, 0, 0, 0, NULL },
};

static void wqe_dealloc(PyObject *self)
{
	struct wqe *wqe = (struct wqe *)self;
	PyTypeObject *type = Py_TYPE(self);

	Py_XDECREF(wqe->sges);
	Py_XDECREF(wqe->data);
	Py_XDECREF(wqe->hdr);
	Py_XDECREF(wqe->ah);
	Py_XDECREF(wqe->window);
	Py_XDECREF(wqe->region);
	Py_XDECREF(wqe->owner);
	PyObject_Free(self);
	Py_DECREF(type);
}

static PyType_Slot wqe_slots[] = {
	{ Py_tp_dealloc, wqe_dealloc },
	{ Py_tp_members, wqe_members },
	{ 0, NULL },
};

static PyType_Spec wqe_spec = {
	.name = "rdmapost._verbs.WQE",
	.basicsize = sizeof(struct wqe),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = wqe_slots,
};

/* ---- work queues --------------------------------------------------------- */

PyTypeObject *rp_work_queue_type;

#define NUMBER(name) MEMBER(work_queue, T_UINT, name, name)

static PyMemberDef queue_members[] = {
	NUMBER(depth), NUMBER(max_sge), NUMBER(max_inline), NUMBER(max_tso_header),
	NUMBER(used), NUMBER(silent),
	MEMBER(work_queue, T_INT, refuses, refuses), MEMBER(work_queue, T_INT, prompt, prompt),
	MEMBER(work_queue, T_OBJECT, pending, pending),
	MEMBER(work_queue, T_OBJECT, faults, faults), MEMBER(work_queue, T_OBJECT, slots, slots),
	{ NULL, 0, 0, 0, NULL },
};

static void queue_dealloc(PyObject *self)
{
	struct work_queue *queue = (struct work_queue *)self;
	PyTypeObject *type = Py_TYPE(self);

	Py_XDECREF(queue->pending);
	Py_XDECREF(queue->faults);
	Py_XDECREF(queue->slots);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyType_Slot queue_slots[] = {
	{ Py_tp_setattro, rp_journaled_setattr },
	{ Py_tp_members, queue_members },
	{ Py_tp_dealloc, queue_dealloc },
	{ 0, NULL },
};

static PyType_Spec queue_spec = {
	.name = "rdmapost._verbs.WorkQueue",
	.basicsize = sizeof(struct work_queue),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = queue_slots,
};

/* An operation that adds an entry takes a slot of the matching list, too. */
static struct work_queue *list_of(const struct work_queue *queue, const struct wqe *wqe)
{
	return queue->slots && wqe->opcode == IBV_WR_TAG_ADD ? (void *)queue->slots : NULL;
}

void rp_queue_expect(struct work_queue *queue, PyObject *wqe, unsigned int count)
{
	struct work_queue *list = list_of(queue, (struct wqe *)wqe);

	queue->incoming += count;
	if (list)
		list->incoming += count;
}

int rp_queue_accept(struct work_queue *queue, PyObject *wqe)
{
	struct work_queue *list = list_of(queue, (struct wqe *)wqe);

	if (rp_append(queue->pending, wqe))
		return ENOMEM;
	queue->used++;
	if (list)
		list->used++;
	return 0;
}

static int is_full(const struct work_queue *queue)
{
	return queue->used + queue->incoming >= queue->depth;
}

/* ---- reading: these return 0 or an errno --------------------------------- */

static int read_sges(struct wqe *wqe, const struct ibv_sge *sge, int count, unsigned int most)
{
	if (count < 0 || (unsigned int)count > most || (count && !sge))
		return EINVAL;
	wqe->sges = PyTuple_New(count);
	for (int i = 0; wqe->sges && i < count; i++) {
		PyObject *one = Py_BuildValue("(KII)", (unsigned long long)sge[i].addr,
					      (unsigned int)sge[i].length, (unsigned int)sge[i].lkey);

		if (!one || PyTuple_SetItem(wqe->sges, i, one))
			return ENOMEM;
	}
	return wqe->sges ? 0 : ENOMEM;
}

static int read_inline(struct wqe *wqe, const struct ibv_send_wr *wr, unsigned int most)
{
	uint64_t size = 0, at = 0;

	for (int i = 0; i < wr->num_sge; i++)
		size += wr->sg_list[i].length;
	if (size > most)
		return EINVAL;
	Py_DECREF(wqe->sges);
	wqe->sges = PyTuple_New(0);
	wqe->data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	for (int i = 0; wqe->data && i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];

		if (sge->length)
			memcpy(PyBytes_AsString(wqe->data) + at, (void *)(uintptr_t)sge->addr,
			       sge->length);
		at += sge->length;
	}
	return wqe->data && wqe->sges ? 0 : ENOMEM;
}

static int read_send(struct wqe *wqe, const struct work_queue *queue, enum ibv_qp_type type,
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

/* TAG_ADD takes one of the list's slots and sets tm.handle; TAG_DEL must name one it has given. */
static int read_op(struct wqe *wqe, const struct work_queue *queue, struct ibv_ops_wr *op)
{
	struct work_queue *list = (struct work_queue *)queue->slots;
	int adds = op->opcode == IBV_WR_TAG_ADD, code;

	wqe->opcode = op->opcode;
	wqe->flags = (unsigned int)op->flags;
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

/* Take one work request in. */
static int take_in(enum posts what, enum ibv_qp_type type, int nested, struct work_queue *queue,
		   void *wr)
{
	static const size_t sizes[] = { sizeof(struct ibv_send_wr), sizeof(struct ibv_recv_wr),
					sizeof(struct ibv_recv_wr), sizeof(struct ibv_ops_wr) };
	struct ibv_recv_wr *recv = wr;
	struct wqe *wqe;
	int code = 0;

	/* The plan of faults counts no post that is made in the middle of a verb. */
	if (queue->faults && !nested && PyDict_Size(PyTuple_GetItem(queue->faults, 1)) > 0)
		code = (int)rp_soft_step(PyTuple_GetItem(queue->faults, 0));
	if (!code)
		code = queue->refuses;
	if (!code && is_full(queue))
		code = ENOMEM;
	if (code)
		return code;
	wqe = (struct wqe *)PyType_GenericAlloc(wqe_type, 0);
	if (!wqe) {
		PyErr_Clear();
		return ENOMEM;
	}
	memcpy(&wqe->wr, wr, sizes[what]);
	if (what == SENDS)
		code = read_send(wqe, queue, type, wr);
	else if (what == OPERATIONS)
		code = read_op(wqe, queue, wr);
	else
		code = read_sges(wqe, recv->sg_list, recv->num_sge, queue->max_sge);
	PyErr_Clear();
	if (!code)
		code = rp_soft_settle(nested, (PyObject *)queue, (PyObject *)wqe, 0);
	Py_DECREF((PyObject *)wqe);
	return code;
}

/* Returns 0, or an errno and in *bad the first that is not taken. */
static int post(enum posts what, uint32_t handle, enum ibv_qp_type type, void *wr, void **bad)
{
	static const enum rp_name names[] = { SQ, RQ, QUEUE, OPS };
	PyGILState_STATE gil = PyGILState_Ensure();
	int nested = rp_soft_enter(), code = EINVAL, any = 0;
	PyObject *found = rp_soft_part(handle, names[what]);
	struct work_queue *queue = (struct work_queue *)found;

	if (found && PyObject_TypeCheck(found, rp_work_queue_type))
		code = 0;
	while (wr && !code) {
		code = take_in(what, type, nested, queue, wr);
		if (code)
			break;
		any = 1;
		/* The three kinds have this in common. */
		wr = ((struct ibv_recv_wr *)wr)->next;
	}
	if (any && queue->prompt)
		rp_soft_start(handle);
	rp_soft_leave(nested);
	Py_XDECREF(found);
	PyGILState_Release(gil);
	if (code)
		*bad = wr;
	return code;
}

int rp_soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	return post(SENDS, qp->handle, qp->qp_type, wr, (void **)bad_wr);
}

int rp_soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return post(RECEIVES, qp->handle, 0, wr, (void **)bad_wr);
}

int rp_soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return post(SRQ_RECEIVES, srq->handle, 0, wr, (void **)bad_wr);
}

int rp_soft_post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad_op)
{
	return post(OPERATIONS, srq->handle, 0, op, (void **)bad_op);
}

int rp_add_soft_queue(PyObject *module)
{
	/* The types are held for ever. */
	wqe_type = (PyTypeObject *)PyType_FromSpec(&wqe_spec);
	rp_work_queue_type = (PyTypeObject *)PyType_FromSpec(&queue_spec);
	if (!wqe_type || !rp_work_queue_type ||
	    PyModule_AddObjectRef(module, "WQE", (PyObject *)wqe_type))
		return -1;
	return PyModule_AddObjectRef(module, "WorkQueue", (PyObject *)rp_work_queue_type);
}

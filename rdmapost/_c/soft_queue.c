/*
 * The soft device's work queues and completion queues, as far as posts and
 * polls reach: taking work requests in, and giving completions out.
 */
#include "soft_device.h"

#include "door.h"

#include <string.h>
#include <structmember.h>

/* ---- work requests ------------------------------------------------------ */

/* A work request as the device holds it: a send, a receive, or a tag-matching operation. */
struct wqe {
	PyObject_HEAD
	unsigned long long wr_id;
	PyObject *opcode; /* a number */
	unsigned int flags, imm;
	PyObject *sges; /* a tuple of (addr, length, lkey) */
	PyObject *data; /* bytes, copied at the post, where it is inline */
	unsigned long long remote_addr, compare_add, swap;
	unsigned int rkey, remote_qpn, remote_qkey, remote_srqn, mss;
	PyObject *ah, *bind, *hdr, *owner;
	unsigned long long recv_wr_id, tag, mask;
	unsigned int handle, unexpected_cnt;
};

static PyTypeObject *wqe_type;

#define OBJECT(field) { #field, T_OBJECT, offsetof(struct wqe, field), 0, NULL }
#define U64(field) { #field, T_ULONGLONG, offsetof(struct wqe, field), 0, NULL }
#define U32(field) { #field, T_UINT, offsetof(struct wqe, field), 0, NULL }

static PyMemberDef wqe_members[] = {
	U64(wr_id), OBJECT(opcode), U32(flags), U32(imm), OBJECT(sges),
	{ "inline", T_OBJECT, offsetof(struct wqe, data), 0, NULL },
	U64(remote_addr), U64(compare_add), U64(swap), U32(rkey),
	U32(remote_qpn), U32(remote_qkey), U32(remote_srqn), U32(mss),
	OBJECT(ah), OBJECT(bind), OBJECT(hdr), OBJECT(owner),
	U64(recv_wr_id), U64(tag), U64(mask), U32(handle), U32(unexpected_cnt),
	{ NULL, 0, 0, 0, NULL },
};

static int wqe_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct wqe *wqe = (struct wqe *)self;
	PyObject *opcode;

	(void)kwargs;
	if (wqe->opcode || !PyArg_ParseTuple(args, "KOII", &wqe->wr_id, &opcode,
					     &wqe->flags, &wqe->imm))
		return -1;
	wqe->opcode = Py_NewRef(opcode);
	wqe->sges = PyTuple_New(0);
	return wqe->sges ? 0 : -1;
}

static void wqe_dealloc(PyObject *self)
{
	struct wqe *wqe = (struct wqe *)self;
	PyTypeObject *type = Py_TYPE(self);

	Py_XDECREF(wqe->opcode);
	Py_XDECREF(wqe->sges);
	Py_XDECREF(wqe->data);
	Py_XDECREF(wqe->ah);
	Py_XDECREF(wqe->bind);
	Py_XDECREF(wqe->hdr);
	Py_XDECREF(wqe->owner);
	PyObject_Free(self);
	Py_DECREF(type);
}

static PyType_Slot wqe_slots[] = {
	{ Py_tp_init, wqe_init },
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

/* Opcodes by number, as the device compares them. */
static PyObject *opcodes;

static PyObject *read_sges(const struct ibv_sge *sge, int count)
{
	PyObject *sges = PyTuple_New(count);

	for (int i = 0; sges && i < count; i++) {
		PyObject *one = Py_BuildValue("(KII)",
					      (unsigned long long)sge[i].addr,
					      (unsigned int)sge[i].length,
					      (unsigned int)sge[i].lkey);

		if (!one || PyTuple_SetItem(sges, i, one))
			Py_CLEAR(sges);
	}
	return sges;
}

/* Make one; NULL with an errno in *code.  `sge` need not be there where there are none. */
static struct wqe *new_wqe(uint64_t wr_id, unsigned int opcode,
			   const struct ibv_sge *sge, int num_sge,
			   unsigned int most, int *code)
{
	struct wqe *wqe;
	PyObject *number;

	if (num_sge < 0 || (unsigned int)num_sge > most || (num_sge && !sge)) {
		*code = EINVAL;
		return NULL;
	}
	wqe = (struct wqe *)PyType_GenericAlloc(wqe_type, 0);
	number = PyLong_FromUnsignedLong(opcode);
	if (wqe && number) {
		wqe->wr_id = wr_id;
		wqe->opcode = Py_XNewRef(
			PyDict_GetItemWithError(opcodes, number));
		if (!wqe->opcode && !PyErr_Occurred())
			wqe->opcode = Py_NewRef(number);
		wqe->sges = read_sges(sge, num_sge);
	}
	Py_XDECREF(number);
	if (!wqe || !wqe->opcode || !wqe->sges) {
		Py_XDECREF((PyObject *)wqe);
		PyErr_Clear();
		*code = ENOMEM;
		return NULL;
	}
	return wqe;
}

/* The bytes of inline data; NULL with an errno in *code. */
static PyObject *read_inline(const struct ibv_send_wr *wr, unsigned int most,
			     int *code)
{
	uint64_t size = 0, at = 0;
	PyObject *data;

	for (int i = 0; i < wr->num_sge; i++)
		size += wr->sg_list[i].length;
	*code = size > most ? EINVAL : ENOMEM;
	data = size > most ? NULL :
			     PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	for (int i = 0; data && i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];

		if (sge->length)
			memcpy(PyBytes_AsString(data) + at,
			       (const void *)(uintptr_t)sge->addr, sge->length);
		at += sge->length;
	}
	PyErr_Clear();
	return data;
}

/* What is in the union and behind it; 0 or an errno. */
static int read_more(struct wqe *wqe, const struct work_queue *queue,
		     enum ibv_qp_type type, const struct ibv_send_wr *wr)
{
	const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;
	PyObject *window, *region;

	switch (wr->opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_RDMA_READ:
		wqe->remote_addr = wr->wr.rdma.remote_addr;
		wqe->rkey = wr->wr.rdma.rkey;
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		wqe->remote_addr = wr->wr.atomic.remote_addr;
		wqe->compare_add = wr->wr.atomic.compare_add;
		wqe->swap = wr->wr.atomic.swap;
		wqe->rkey = wr->wr.atomic.rkey;
		break;
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_TSO:
		if (type != IBV_QPT_UD)
			break;
		wqe->remote_qpn = wr->wr.ud.remote_qpn;
		wqe->remote_qkey = wr->wr.ud.remote_qkey;
		if (wr->wr.ud.ah)
			wqe->ah = rp_soft_object(wr->wr.ud.ah->handle);
		if (!wqe->ah)
			return EINVAL;
		break;
	case IBV_WR_BIND_MW:
		wqe->rkey = wr->bind_mw.rkey;
		if (!wr->bind_mw.mw || !info->mr)
			return EINVAL;
		window = rp_soft_object(wr->bind_mw.mw->handle);
		region = rp_soft_object(info->mr->handle);
		if (window && region)
			wqe->bind = Py_BuildValue(
				"(OOKKI)", window, region,
				(unsigned long long)info->addr,
				(unsigned long long)info->length,
				info->mw_access_flags);
		Py_XDECREF(window);
		Py_XDECREF(region);
		if (!wqe->bind)
			return EINVAL;
		break;
	default:
		break;
	}
	if (wr->opcode == IBV_WR_TSO) {
		if (wr->tso.hdr_sz > queue->max_tso_header ||
		    (wr->tso.hdr_sz && !wr->tso.hdr))
			return EINVAL;
		wqe->hdr = PyBytes_FromStringAndSize(wr->tso.hdr,
						     wr->tso.hdr_sz);
		wqe->mss = wr->tso.mss;
		if (!wqe->hdr)
			return ENOMEM;
	}
	if (type == IBV_QPT_XRC_SEND)
		wqe->remote_srqn = wr->qp_type.xrc.remote_srqn;
	return 0;
}

PyObject *rp_read_send(const struct work_queue *queue, enum ibv_qp_type type,
		       const struct ibv_send_wr *wr, int *code)
{
	struct wqe *wqe = new_wqe(wr->wr_id, wr->opcode, wr->sg_list,
				  wr->num_sge, queue->max_sge, code);

	if (!wqe)
		return NULL;
	wqe->flags = wr->send_flags;
	wqe->imm = wr->imm_data;
	if (wr->send_flags & IBV_SEND_INLINE) {
		wqe->data = read_inline(wr, queue->max_inline, code);
		Py_CLEAR(wqe->sges);
		wqe->sges = PyTuple_New(0);
	}
	if (!(wr->send_flags & IBV_SEND_INLINE) || (wqe->data && wqe->sges)) {
		*code = read_more(wqe, queue, type, wr);
		if (!*code)
			return (PyObject *)wqe;
	}
	PyErr_Clear();
	Py_DECREF(wqe);
	return NULL;
}

PyObject *rp_read_recv(const struct work_queue *queue,
		       const struct ibv_recv_wr *wr, int *code)
{
	return (PyObject *)new_wqe(wr->wr_id, 0, wr->sg_list, wr->num_sge,
				   queue->max_sge, code);
}

PyObject *rp_read_op(struct work_queue *slots, struct ibv_ops_wr *op, int *code)
{
	int adds = op->opcode == IBV_WR_TAG_ADD;
	struct wqe *wqe;

	*code = EINVAL;
	if (adds && slots->used + slots->incoming >= slots->depth)
		*code = ENOMEM;
	else if (op->opcode == IBV_WR_TAG_DEL ?
			 op->tm.handle && op->tm.handle <= slots->last_handle :
			 adds || op->opcode == IBV_WR_TAG_SYNC)
		*code = 0;
	if (*code)
		return NULL;
	wqe = new_wqe(op->wr_id, op->opcode, op->tm.add.sg_list,
		      adds ? op->tm.add.num_sge : 0, slots->max_sge, code);
	if (!wqe)
		return NULL;
	Py_CLEAR(wqe->opcode);
	wqe->opcode = PyLong_FromUnsignedLong(op->opcode);
	if (!wqe->opcode) {
		PyErr_Clear();
		Py_DECREF(wqe);
		*code = ENOMEM;
		return NULL;
	}
	if (adds) {
		op->tm.handle = ++slots->last_handle;
		wqe->recv_wr_id = op->tm.add.recv_wr_id;
		wqe->tag = op->tm.add.tag;
		wqe->mask = op->tm.add.mask;
	}
	wqe->flags = (unsigned int)op->flags;
	wqe->unexpected_cnt = op->tm.unexpected_cnt;
	wqe->handle = op->tm.handle;
	return (PyObject *)wqe;
}

/* ---- work queues -------------------------------------------------------- */

PyTypeObject *rp_work_queue_type, *rp_completion_ring_type;

#define MEMBER(type, kind, field)                                              \
	{ #field, kind, offsetof(struct type, field), 0, NULL }

static PyMemberDef queue_members[] = {
	MEMBER(work_queue, T_UINT, depth),
	MEMBER(work_queue, T_UINT, max_sge),
	MEMBER(work_queue, T_UINT, max_inline),
	MEMBER(work_queue, T_UINT, max_tso_header),
	MEMBER(work_queue, T_UINT, used),
	MEMBER(work_queue, T_UINT, silent),
	MEMBER(work_queue, T_INT, refuses),
	MEMBER(work_queue, T_INT, prompt),
	MEMBER(work_queue, T_OBJECT, faults),
	{ NULL, 0, 0, 0, NULL },
};

static void queue_dealloc(PyObject *self)
{
	Py_CLEAR(((struct work_queue *)self)->faults);
	((destructor)PyType_GetSlot(rp_fifo_type, Py_tp_dealloc))(self);
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

/* ---- completion queues -------------------------------------------------- */

/* What push returns. */
enum { OVERRUN, ADDED, ADDED_WITH_EVENT };

static struct cq_entry *entry_at(const struct completion_ring *ring,
				 uint64_t index)
{
	return &ring->entries[index & (ring->room - 1)];
}

static int grow(struct completion_ring *ring)
{
	uint64_t count = ring->end - ring->head;
	size_t room = ring->room ? 2 * ring->room : 16;
	struct cq_entry *entries;

	if (count < ring->room)
		return 0;
	entries = malloc(room * sizeof(*entries)); /* freed by ring_dealloc */
	if (!entries) {
		PyErr_NoMemory();
		return -1;
	}
	for (uint64_t i = ring->head; i != ring->end; i++)
		entries[i & (room - 1)] = *entry_at(ring, i);
	free(ring->entries);
	ring->entries = entries;
	ring->room = room;
	return 0;
}

/* The fields of struct ibv_wc as rdmapost/soft/completion.py orders them; 0, or -1. */
static int read_wc(PyObject *fields, struct ibv_wc *wc)
{
	enum { FIELDS = 13 };
	unsigned long long n[FIELDS];

	if (!PyTuple_Check(fields) || PyTuple_Size(fields) != FIELDS) {
		PyErr_SetString(PyExc_TypeError, "a completion has 13 fields");
		return -1;
	}
	for (int i = 0; i < FIELDS; i++)
		n[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(fields, i));
	if (PyErr_Occurred())
		return -1;
	memset(wc, 0, sizeof(*wc));
	wc->wr_id = n[0];
	wc->status = (enum ibv_wc_status)n[1];
	wc->opcode = (enum ibv_wc_opcode)n[2];
	wc->vendor_err = (uint32_t)n[3];
	wc->byte_len = (uint32_t)n[4];
	wc->imm_data = (uint32_t)n[5];
	wc->qp_num = (uint32_t)n[6];
	wc->src_qp = (uint32_t)n[7];
	wc->wc_flags = (unsigned int)n[8];
	wc->pkey_index = (uint16_t)n[9];
	wc->slid = (uint16_t)n[10];
	wc->sl = (uint8_t)n[11];
	wc->dlid_path_bits = (uint8_t)n[12];
	return 0;
}

/* push(fields, queue, frees, solicited, (tag, priv)) */
static PyObject *ring_push(PyObject *self, PyObject *const *args,
			   Py_ssize_t nargs)
{
	struct completion_ring *ring = (struct completion_ring *)self;
	struct cq_entry entry;
	int journal, event;

	if (nargs != 5 || !PyObject_TypeCheck(args[1], rp_work_queue_type) ||
	    !PyTuple_Check(args[4]) || PyTuple_Size(args[4]) != 2) {
		PyErr_SetString(PyExc_TypeError,
				"push(fields, queue, frees, solicited, tm_info)");
		return NULL;
	}
	if (ring->end - ring->head >= ring->capacity)
		return PyLong_FromLong(OVERRUN);
	if (read_wc(args[0], &entry.wc))
		return NULL;
	entry.queue = (void *)args[1];
	entry.frees = (unsigned int)PyLong_AsUnsignedLong(args[2]);
	entry.tm.tag = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[4], 0));
	entry.tm.priv = (uint32_t)PyLong_AsUnsignedLong(
		PyTuple_GetItem(args[4], 1));
	event = ring->armed == RP_ARMED_NEXT ||
		(ring->armed == RP_ARMED_SOLICITED &&
		 (entry.wc.status || PyObject_IsTrue(args[3])));
	if (PyErr_Occurred() || grow(ring))
		return NULL;
	journal = ring->end == ring->tail ? rp_journal_ring(self) : 0;
	if (journal < 0)
		return NULL;
	Py_INCREF(args[1]);
	*entry_at(ring, ring->end++) = entry;
	if (journal)
		rp_ring_commit(ring);
	return PyLong_FromLong(event ? ADDED_WITH_EVENT : ADDED);
}

void rp_ring_commit(struct completion_ring *ring)
{
	ring->tail = ring->end;
}

void rp_ring_rollback(struct completion_ring *ring)
{
	while (ring->end != ring->tail)
		Py_DECREF(entry_at(ring, --ring->end)->queue);
}

void rp_ring_forget(struct completion_ring *ring, PyObject *queue)
{
	uint64_t kept = ring->head, dropped;

	for (uint64_t i = ring->head; i != ring->tail; i++)
		if ((PyObject *)entry_at(ring, i)->queue != queue)
			*entry_at(ring, kept++) = *entry_at(ring, i);
	dropped = ring->tail - kept;
	ring->tail = ring->end = kept;
	while (dropped--)
		Py_DECREF(queue);
}

int rp_ring_take(struct completion_ring *ring, struct cq_entry *entry)
{
	if (ring->head == ring->tail)
		return 0;
	*entry = *entry_at(ring, ring->head++);
	return 1;
}

static void ring_dealloc(PyObject *self)
{
	struct completion_ring *ring = (struct completion_ring *)self;
	PyTypeObject *type = Py_TYPE(self);

	while (ring->end != ring->head)
		Py_DECREF(entry_at(ring, --ring->end)->queue);
	free(ring->entries);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyMemberDef ring_members[] = {
	MEMBER(completion_ring, T_UINT, capacity),
	MEMBER(completion_ring, T_INT, armed),
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef ring_methods[] = {
	{ "push", (PyCFunction)(void (*)(void))ring_push, METH_FASTCALL, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot ring_slots[] = {
	{ Py_tp_setattro, rp_journaled_setattr },
	{ Py_tp_dealloc, ring_dealloc },
	{ Py_tp_methods, ring_methods },
	{ Py_tp_members, ring_members },
	{ 0, NULL },
};

static PyType_Spec ring_spec = {
	.name = "rdmapost._verbs.CompletionRing",
	.basicsize = sizeof(struct completion_ring),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = ring_slots,
};

static PyObject *describe_opcodes(PyObject *self, PyObject *dict)
{
	(void)self;
	if (!PyDict_Check(dict)) {
		PyErr_SetString(PyExc_TypeError, "opcodes by number");
		return NULL;
	}
	if (!opcodes)
		opcodes = Py_NewRef(dict); /* held for ever */
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "describe_opcodes", describe_opcodes, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_queue(PyObject *module)
{
	/* The types are held for ever. */
	wqe_type = (PyTypeObject *)PyType_FromSpec(&wqe_spec);
	rp_work_queue_type = (PyTypeObject *)PyType_FromSpecWithBases(
		&queue_spec, (PyObject *)rp_fifo_type);
	rp_completion_ring_type = (PyTypeObject *)PyType_FromSpec(&ring_spec);
	return !wqe_type || !rp_work_queue_type || !rp_completion_ring_type ||
			       PyModule_AddObjectRef(module, "WQE",
						     (PyObject *)wqe_type) ||
			       PyModule_AddObjectRef(
				       module, "WorkQueue",
				       (PyObject *)rp_work_queue_type) ||
			       PyModule_AddObjectRef(
				       module, "CompletionRing",
				       (PyObject *)rp_completion_ring_type) ||
			       PyModule_AddFunctions(module, functions) ?
		       -1 : 0;
}

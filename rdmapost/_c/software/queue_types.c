/*
 * The types of software devices' queues and of the work requests in them (device_queues.h), and the
 * entries of completion queues.
 */
#include "software/device_queues.h"

#include <structmember.h>

/* ---- work requests ------------------------------------------------------- */

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

PyObject *rp_tuple_of_sges(const struct ibv_sge *sge, unsigned int count)
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
					    rp_tuple_of_sges(wqe->sge, wqe->num_sge);
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

int rp_append_hidden(struct device_queue *cq, PyObject *entry)
{
	int failed = rp_append(cq->pending, entry);

	if (!failed)
		RP_ADD(&cq->hidden, 1);
	return failed;
}

PyObject *rp_withdraw(struct device_queue *cq)
{
	PyObject *entry = PyObject_CallMethodObjArgs(cq->pending, rp_names[POP_LAST], NULL);

	RP_ADD(&cq->hidden, -1u);
	return entry;
}

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

static PyMethodDef functions[] = {
	RP_METHOD_NAMED("add", soft_add),
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_queue_types(PyObject *module)
{
	withdraws = PyCFunction_New(&withdraw_method, NULL); /* never released */
	return !withdraws ||
	       rp_add_type(module, "rdmapost._verbs.WQE", sizeof(struct wqe), 0, wqe_slots,
			   &rp_wqe_type) ||
	       rp_add_type(module, "rdmapost._verbs.DeviceQueue", sizeof(struct device_queue),
			   Py_TPFLAGS_BASETYPE, queue_slots, &rp_device_queue_type) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}

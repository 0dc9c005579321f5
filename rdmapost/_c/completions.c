/*
 * Polling: each struct ibv_wc becomes a WC (rdmapost/completion.py), and its
 * work request is retired.
 *
 * The queue that a completion belongs to is known by its ticket; see
 * rdmapost/inflight.py.
 */
#include "inflight.h"

#include <endian.h>

enum { FIELDS = 16, BATCH = 64 };

/* What the fields of a WC are made of, as rdmapost/completion.py gave it. */
static struct {
	PyObject *type; /* the class, a tuple */
	PyObject *statuses, *opcodes, *flags; /* dicts: the members by number */
	PyObject *other_status; /* of a number that has none */
	PyObject *flag_type; /* makes one of any number */
	newfunc new_tuple;
} made_of;

/* Return a new reference to what a dict has for a number, or to `otherwise`. */
static PyObject *member(PyObject *members, unsigned long number,
			PyObject *otherwise)
{
	PyObject *key = PyLong_FromUnsignedLong(number), *found;

	if (!key)
		return NULL;
	found = PyDict_GetItemWithError(members, key);
	Py_DECREF(key);
	if (!found && !PyErr_Occurred())
		found = otherwise;
	return Py_XNewRef(found);
}

static PyObject *flags_of(unsigned int flags)
{
	PyObject *found = member(made_of.flags, flags, NULL);

	if (found || PyErr_Occurred())
		return found;
	return PyObject_CallFunction(made_of.flag_type, "I", flags);
}

static PyObject *number(unsigned long value)
{
	return PyLong_FromUnsignedLong(value);
}

static PyObject *number_if(int there, unsigned long value)
{
	return there ? number(value) : Py_NewRef(Py_None);
}

/* Make a WC; it takes the reference to wr_id. */
static PyObject *make(const struct ibv_wc *wc, const struct ibv_wc_tm_info *tm,
		      PyObject *wr_id)
{
	int good = wc->status == IBV_WC_SUCCESS;
	/* Some drivers set the flags at the sender too, and leave the data. */
	int received = good && wc->opcode & IBV_WC_RECV;
	/* Of a failed one, no more means anything (ibv_poll_cq(3)). */
	const struct ibv_wc none = { .wr_id = 0 }, *more = good ? wc : &none;
	unsigned int flags = more->wc_flags;
	PyObject *fields[FIELDS] = {
		wr_id,
		member(made_of.statuses, wc->status, made_of.other_status),
		good ? member(made_of.opcodes, wc->opcode, Py_None) :
		       Py_NewRef(Py_None),
		number(more->byte_len),
		number_if(received && flags & IBV_WC_WITH_IMM,
			  be32toh(wc->imm_data)),
		number_if(received && flags & IBV_WC_WITH_INV,
			  wc->invalidated_rkey),
		number(wc->qp_num),
		number(more->src_qp),
		flags_of(flags),
		number(wc->vendor_err),
		number(more->pkey_index),
		number(more->slid),
		number(more->sl),
		number(more->dlid_path_bits),
		tm ? PyLong_FromUnsignedLongLong(tm->tag) : Py_NewRef(Py_None),
		number_if(tm != NULL, tm ? tm->priv : 0),
	};
	PyObject *args = NULL, *tuple = NULL, *completion = NULL;
	int whole = 1;

	for (int i = 0; i < FIELDS; i++)
		whole = whole && fields[i];
	if (whole)
		tuple = PyTuple_Pack(FIELDS, fields[0], fields[1], fields[2],
				     fields[3], fields[4], fields[5], fields[6],
				     fields[7], fields[8], fields[9],
				     fields[10], fields[11], fields[12],
				     fields[13], fields[14], fields[15]);
	if (tuple)
		args = PyTuple_Pack(1, tuple);
	if (args)
		completion = made_of.new_tuple((PyTypeObject *)made_of.type,
					       args, NULL);
	Py_XDECREF(args);
	Py_XDECREF(tuple);
	for (int i = 0; i < FIELDS; i++)
		Py_XDECREF(fields[i]);
	return completion;
}

/*
 * Settle one completion, and append it to a list or a deque; 0, or -1 with an
 * exception.  `tm` is NULL on a CQ that tells no tags.
 */
static int settle(struct rp_in_flight *queue, const struct ibv_wc *wc,
		  const struct ibv_wc_tm_info *tm, PyObject *into)
{
	int good = wc->status == IBV_WC_SUCCESS;
	int matched = good && wc->wc_flags & IBV_WC_TM_MATCH;
	int whole = wc->wc_flags & IBV_WC_TM_DATA_VALID;
	PyObject *wr_id, *completion, *done;
	int failed;

	if (tm && matched && !whole)
		rp_match(queue, wc->wr_id);
	wr_id = rp_complete(queue, wc->wr_id);
	if (!wr_id)
		return PyErr_Occurred() ? -1 : 0;
	/* The second completion of a message does not say what the first has said. */
	if (!good || wc->opcode != IBV_WC_TM_RECV || (whole && !matched))
		tm = NULL;
	completion = make(wc, tm, wr_id);
	if (!completion)
		return -1;
	if (PyList_Check(into)) {
		failed = PyList_Append(into, completion);
	} else {
		done = PyObject_CallMethod(into, "append", "(O)", completion);
		failed = done ? 0 : -1;
		Py_XDECREF(done);
	}
	Py_DECREF(completion);
	return failed;
}

static int settle_all(const struct ibv_wc *wc, const struct ibv_wc_tm_info *tm,
		      int count, PyObject *queues, PyObject *into)
{
	struct rp_in_flight *queue = NULL;
	int failed = 0;

	for (int i = 0; i < count && !failed; i++) {
		uint64_t ticket = wc[i].wr_id;

		if (!queue || queue->base != (ticket >> 32) << 32) {
			if (queue)
				rp_drop_done(queue);
			Py_XDECREF((PyObject *)queue);
			queue = (struct rp_in_flight *)member(
				queues, (unsigned long)(ticket >> 32), NULL);
		}
		/* Of a queue that has been destroyed nobody waits for it. */
		if (queue)
			failed = settle(queue, wc + i, tm ? tm + i : NULL,
					into);
		else
			failed = PyErr_Occurred() != NULL;
	}
	if (queue)
		rp_drop_done(queue);
	Py_XDECREF((PyObject *)queue);
	return failed ? -1 : 0;
}

/*
 * poll(cq, cq_ex, most, spin_ns, queues, into): the addresses of the CQ's
 * struct and, if it tells tags, of its extended one, else 0; how many, BATCH or
 * fewer, and how long to spin until there are so many.  Only spinning gives up
 * the GIL.  Returns how many were polled, or a negative errno.
 */
static PyObject *poll(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	static const uint64_t most_of[] = { UINT64_MAX, UINT64_MAX, BATCH,
					    INT64_MAX };
	enum { NUMBERS = 4, QUEUES = NUMBERS, INTO, ALL };
	struct ibv_wc wc[BATCH];
	struct ibv_wc_tm_info tm[BATCH];
	uint64_t n[NUMBERS];
	struct ibv_cq *cq;
	struct ibv_cq_ex *cq_ex;
	int64_t spin_ns;
	int most, count;

	(void)self;
	if (rp_read_numbers(args, nargs - (ALL - NUMBERS), NUMBERS, most_of, n))
		return NULL;
	if (!PyDict_Check(args[QUEUES])) {
		PyErr_SetString(PyExc_TypeError, "queues is a dict");
		return NULL;
	}
	cq = (void *)(uintptr_t)n[0];
	cq_ex = (void *)(uintptr_t)n[1];
	most = (int)n[2];
	spin_ns = (int64_t)n[3];
	if (spin_ns) {
		Py_BEGIN_ALLOW_THREADS
		count = cq_ex ? rp_poll_cq_ex(cq_ex, wc, tm, most, most,
					      spin_ns) :
				rp_poll_cq(cq, wc, most, most, spin_ns);
		Py_END_ALLOW_THREADS
	} else {
		count = cq_ex ? rp_poll_cq_ex(cq_ex, wc, tm, most, 0, 0) :
				rp_poll_cq(cq, wc, most, 0, 0);
	}
	if (count < 0)
		return PyLong_FromLong(errno ? -errno : -EIO);
	if (settle_all(wc, cq_ex ? tm : NULL, count, args[QUEUES], args[INTO]))
		return NULL;
	return PyLong_FromLong(count);
}

/* make_completions_of(type, statuses, other_status, opcodes, flags, flag_type) */
static PyObject *make_completions_of(PyObject *self, PyObject *args)
{
	(void)self;
	if (made_of.type) {
		PyErr_SetString(PyExc_RuntimeError, "it is known already");
		return NULL;
	}
	if (!PyArg_ParseTuple(args, "O!O!OO!O!O", &PyType_Type, &made_of.type,
			      &PyDict_Type, &made_of.statuses,
			      &made_of.other_status, &PyDict_Type,
			      &made_of.opcodes, &PyDict_Type, &made_of.flags,
			      &made_of.flag_type))
		return NULL;
	Py_INCREF(made_of.type);
	Py_INCREF(made_of.statuses);
	Py_INCREF(made_of.other_status);
	Py_INCREF(made_of.opcodes);
	Py_INCREF(made_of.flags);
	Py_INCREF(made_of.flag_type);
	made_of.new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	RP_METHOD(poll),
	{ "make_completions_of", make_completions_of, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_completions(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}

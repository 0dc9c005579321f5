/*
 * Recognising work requests that are plainly right, and writing them as records.
 *
 * That takes a few comparisons: most have SGEs of live regions, and flags that
 * their opcode takes.  Nothing is refused here; poster.c says what becomes of
 * the rest.  What is in a work request is read where its class has it
 * (slots.c), and none of this runs code of Python's.
 */
#include "plain.h"

#include "handle.h"

struct kind rp_kinds[KINDS];
int rp_kinds_known;

/* What work requests refer to: the classes, and where their objects have what. */
static struct {
	PyObject *sge, *mr, *ah;
	struct rp_slot mr_pd, mr_addr, mr_end, mr_writable;
	struct rp_slot ah_pd, ah_address;
} known;

/* ---- reading ------------------------------------------------------------ */

static int slot_is(PyObject *object, const struct rp_slot *slot,
		   PyObject *wanted)
{
	PyObject *value = rp_get_slot(object, slot);

	Py_XDECREF(value);
	return value && value == wanted;
}

/* Whether a resource has been made and not been closed. */
static int is_open(PyObject *resource)
{
	return rp_is_open((struct rp_handle *)resource);
}

/* Whether a region is open, and, if that is checked, right for an SGE. */
static int region_is_right(const struct poster *p, const struct kind *kind,
			   PyObject *mr, const struct ibv_sge *sge)
{
	uint64_t start, end;

	if (!rp_has_type(mr, known.mr) || !is_open(mr))
		return 0;
	if (!p->checked)
		return 1;
	return slot_is(mr, &known.mr_pd, p->pd) &&
	       (!kind->writes || slot_is(mr, &known.mr_writable, Py_True)) &&
	       rp_get_number(mr, &known.mr_addr, UINT64_MAX, &start) &&
	       rp_get_number(mr, &known.mr_end, UINT64_MAX, &end) &&
	       sge->addr >= start && sge->addr <= end &&
	       sge->length <= end - sge->addr;
}

static int put_sge(const struct poster *p, const struct kind *kind,
		   PyObject *from, struct ibv_sge *sge)
{
	uint64_t addr, length, lkey;
	PyObject *owner;

	if (!rp_has_type(from, known.sge) || PyTuple_Size(from) != 4 ||
	    !rp_to_number(PyTuple_GetItem(from, 0), UINT64_MAX, &addr) ||
	    !rp_to_number(PyTuple_GetItem(from, 1), UINT32_MAX, &length) ||
	    !rp_to_number(PyTuple_GetItem(from, 2), UINT32_MAX, &lkey) ||
	    (p->checked && !length))
		return 0;
	sge->addr = addr;
	sge->length = (uint32_t)length;
	sge->lkey = (uint32_t)lkey;
	owner = PyTuple_GetItem(from, 3);
	return owner == Py_None || region_is_right(p, kind, owner, sge);
}

/* Whether the address handle is what the queue pair's type wants; its struct, too. */
static int put_ah(const struct poster *p, PyObject *ah, struct ibv_send_wr *wr)
{
	uint64_t address;

	if (!p->datagram)
		return ah == Py_None;
	if (!rp_has_type(ah, known.ah) || !is_open(ah) ||
	    !slot_is(ah, &known.ah_pd, p->pd) ||
	    !rp_get_number(ah, &known.ah_address, UINT64_MAX, &address))
		return 0;
	wr->wr.ud.ah = (void *)(uintptr_t)address;
	return 1;
}

/* ---- writing a record --------------------------------------------------- */

/* Return a tuple of an sg_list, or the SGE that it is, or NULL. */
static PyObject *gather(PyObject *sg_list)
{
	PyObject *tuple;
	int collects;

	if (rp_has_type(sg_list, known.sge) || PyTuple_CheckExact(sg_list))
		return Py_NewRef(sg_list);
	if (!PyList_CheckExact(sg_list))
		return NULL;
	/* A finalizer might want the lock that is held here. */
	collects = PyGC_Disable();
	tuple = PyList_AsTuple(sg_list);
	if (collects)
		PyGC_Enable();
	return tuple;
}

/* Return what was gathered with one more; takes the reference to it. */
static PyObject *with(PyObject *gathered, PyObject *more)
{
	int collects = PyGC_Disable();
	PyObject *tuple = NULL, *one = NULL;

	if (rp_has_type(gathered, known.sge)) {
		tuple = PyTuple_Pack(2, gathered, more);
	} else {
		one = PyTuple_Pack(1, more);
		tuple = one ? PySequence_Concat(gathered, one) : NULL;
	}
	if (collects)
		PyGC_Enable();
	Py_XDECREF(one);
	Py_DECREF(gathered);
	return tuple;
}

static int make_room(struct poster *p, size_t bytes)
{
	size_t size = p->used + bytes;
	char *records;

	if (size <= p->size)
		return 1;
	records = PyMem_Realloc(p->records, 2 * size);
	if (!records)
		return 0;
	p->records = records;
	p->size = 2 * size;
	return 1;
}

int rp_put_sges(const struct poster *p, const struct kind *kind,
		PyObject *gathered, struct ibv_sge *sge, int count)
{
	uint64_t total = 0;

	for (int i = 0; i < count; i++) {
		PyObject *one = rp_has_type(gathered, known.sge) ?
					gathered : PyTuple_GetItem(gathered, i);

		if (!one || !put_sge(p, kind, one, sge + i))
			return 0;
		total += sge[i].length;
	}
	if (!p->checked)
		return 1;
	return total <= p->most && (!kind->atomic || (count == 1 && total == 8));
}

static int put_send(struct poster *p, const struct kind *kind, PyObject *from,
		    struct ibv_send_wr *wr, PyObject **refers_to)
{
	uint64_t number;
	PyObject *ah;
	int right;

	wr->opcode = (enum ibv_wr_opcode)kind->opcode;
	if (!rp_get_number(from, &kind->send_flags, UINT32_MAX, &number) ||
	    number & ~(uint64_t)p->flags[kind - rp_kinds])
		return 0;
	wr->send_flags = (unsigned int)number;
	for (int i = 0; i < kind->numbers; i++) {
		char *at = (char *)wr + kind->number[i].at;
		int wide = kind->number[i].size == sizeof(uint64_t);

		if (!rp_get_number(from, &kind->number[i].slot,
				wide ? UINT64_MAX : UINT32_MAX, &number))
			return 0;
		if (wide)
			*(uint64_t *)(void *)at = number;
		else
			*(uint32_t *)(void *)at = (uint32_t)number;
	}
	if (kind->atomic && p->checked && wr->wr.atomic.remote_addr % 8)
		return 0;
	if (!kind->has_ah)
		return 1;
	ah = rp_get_slot(from, &kind->ah);
	right = ah && put_ah(p, ah, wr);
	if (right && p->datagram) {
		*refers_to = with(*refers_to, ah);
		right = *refers_to != NULL;
	}
	Py_XDECREF(ah);
	return right;
}

int rp_put(struct poster *p, const struct kind *kind, PyObject *from,
	   PyObject **wr_id, PyObject **refers_to)
{
	uint64_t ticket = rp_ticket(p->in_flight, 0), number;
	size_t head = p->verb == SEND ? sizeof(struct ibv_send_wr) :
					sizeof(struct ibv_recv_wr);
	PyObject *sg_list = kind->has_sges ?
				    rp_get_slot(from, &kind->sg_list) :
				    PyTuple_New(0);
	Py_ssize_t count = 1;
	char *at;

	*refers_to = sg_list ? gather(sg_list) : NULL;
	Py_XDECREF(sg_list);
	*wr_id = rp_get_slot(from, &kind->wr_id);
	if (!*refers_to || !*wr_id || !PyLong_CheckExact(*wr_id) ||
	    !rp_to_number(*wr_id, UINT64_MAX, &number))
		return 0;
	if (!rp_has_type(*refers_to, known.sge))
		count = PyTuple_Size(*refers_to);
	if (count > p->max_sge ||
	    !make_room(p, head + (size_t)count * sizeof(struct ibv_sge)))
		return 0;
	at = p->records + p->used;
	p->used += head + (size_t)count * sizeof(struct ibv_sge);
	memset(at, 0, head);
	if (!rp_put_sges(p, kind, *refers_to, (void *)(at + head), (int)count))
		return 0;
	if (p->verb == SEND) {
		struct ibv_send_wr *wr = (void *)at;

		wr->wr_id = ticket;
		wr->num_sge = (int)count;
		return put_send(p, kind, from, wr, refers_to);
	}
	((struct ibv_recv_wr *)(void *)at)->wr_id = ticket;
	((struct ibv_recv_wr *)(void *)at)->num_sge = (int)count;
	return 1;
}

/* ---- which classes there are -------------------------------------------- */

/* describe_resources(SGE, MR, AH); a second time changes nothing. */
static PyObject *describe_resources(PyObject *self, PyObject *args)
{
	PyObject *sge, *mr, *ah;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!O!O!", &PyType_Type, &sge, &PyType_Type,
			      &mr, &PyType_Type, &ah))
		return NULL;
	if (rp_find_slot(mr, "pd", &known.mr_pd) ||
	    rp_find_slot(mr, "addr", &known.mr_addr) ||
	    rp_find_slot(mr, "end", &known.mr_end) ||
	    rp_find_slot(mr, "writable", &known.mr_writable) ||
	    rp_find_slot(ah, "pd", &known.ah_pd) ||
	    rp_find_slot(ah, "address", &known.ah_address))
		return NULL;
	if (!known.sge) {
		known.mr = Py_NewRef(mr);
		known.ah = Py_NewRef(ah);
		known.sge = Py_NewRef(sge);
	}
	Py_RETURN_NONE;
}

/* Find a slot that not every class has; 1 if it is there, or -1 with an exception. */
static int find_if_there(PyObject *type, const char *name, struct rp_slot *slot)
{
	int there = PyObject_HasAttrString(type, name);

	return there && rp_find_slot(type, name, slot) ? -1 : there;
}

/* Return the number of a kind, which is kept for ever if it is new. */
static PyObject *number_of(const struct kind *kind)
{
	int i = 0;

	while (i < rp_kinds_known && rp_kinds[i].type != kind->type)
		i++;
	if (i == KINDS) {
		PyErr_SetString(PyExc_ValueError, "too many");
		return NULL;
	}
	if (i == rp_kinds_known) {
		Py_INCREF(kind->type);
		rp_kinds[i] = *kind;
		rp_kinds_known++;
	}
	return PyLong_FromLong(i);
}

/*
 * describe_wr(type, opcode, writes, atomic, numbers): a class; whether its
 * buffers are written to, and are those of an atomic; and its numbers, each as
 * (name, offset in struct ibv_send_wr, bytes).  Returns its index, also where
 * another thread has described it in the meantime.
 */
static PyObject *describe_wr(PyObject *self, PyObject *args)
{
	struct kind kind = { .numbers = 0 };
	PyObject *numbers;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!IppO!", &PyType_Type, &kind.type,
			      &kind.opcode, &kind.writes, &kind.atomic,
			      &PyTuple_Type, &numbers))
		return NULL;
	kind.numbers = (int)PyTuple_Size(numbers);
	if (kind.numbers > NUMBERS) {
		PyErr_SetString(PyExc_ValueError, "too many");
		return NULL;
	}
	for (int i = 0; i < kind.numbers; i++) {
		const char *name;
		Py_ssize_t at, size;

		if (!PyArg_ParseTuple(PyTuple_GetItem(numbers, i), "snn", &name,
				      &at, &size) ||
		    rp_find_slot(kind.type, name, &kind.number[i].slot))
			return NULL;
		kind.number[i].at = (size_t)at;
		kind.number[i].size = (size_t)size;
	}
	kind.has_sges = find_if_there(kind.type, "sg_list", &kind.sg_list);
	kind.has_flags = find_if_there(kind.type, "send_flags",
				       &kind.send_flags);
	kind.has_ah = find_if_there(kind.type, "ah", &kind.ah);
	if (kind.has_sges < 0 || kind.has_flags < 0 || kind.has_ah < 0 ||
	    rp_find_slot(kind.type, "wr_id", &kind.wr_id))
		return NULL;
	return number_of(&kind);
}

static PyMethodDef functions[] = {
	{ "describe_resources", describe_resources, METH_VARARGS, NULL },
	{ "describe_wr", describe_wr, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_kinds(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}

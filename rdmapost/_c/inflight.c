/* What is posted and not known to be done (inflight.h). */
#include "inflight.h"

#include <structmember.h>

enum { FREE, POSTED, DONE, MATCHED, EARLY };

PyObject *rp_in_flight_type, *rp_sent_type;

/* ---- what an entry holds ------------------------------------------------ */

static int is_handle(PyObject *object)
{
	static PyTypeObject *known; /* a region's, nearly always */

	if (Py_TYPE(object) == known)
		return 1;
	if (!PyObject_TypeCheck(object, (PyTypeObject *)rp_handle_type))
		return 0;
	if (!known)
		known = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(object));
	return 1;
}

static void each(PyObject *held, void (*f)(struct rp_handle *))
{
	if (!held || held == Py_None)
		return;
	if (is_handle(held)) {
		f((struct rp_handle *)held);
		return;
	}
	if (!PyTuple_CheckExact(held))
		return;
	for (Py_ssize_t i = 0; i < PyTuple_Size(held); i++)
		each(PyTuple_GetItem(held, i), f);
}

void rp_name_all(PyObject *held)
{
	each(held, rp_name);
}

void rp_unname_all(PyObject *held)
{
	each(held, rp_unname);
}

/* ---- the entries -------------------------------------------------------- */

static struct rp_entry *at(const struct rp_in_flight *q, uint64_t index)
{
	return &q->entries[index & (q->size - 1)];
}

static int grow(struct rp_in_flight *q)
{
	size_t size = q->size ? 2 * q->size : 16;
	struct rp_entry *entries = PyMem_Calloc(size, sizeof(*entries));

	if (!entries) {
		PyErr_NoMemory();
		return -1;
	}
	if (q->in_order) {
		for (size_t i = q->dropped; i != q->end; i++)
			entries[i & (size - 1)] = *at(q, i);
	} else {
		for (size_t i = 0; i < q->size; i++)
			entries[i] = q->entries[i];
		for (size_t i = size; i-- > q->size;) {
			entries[i].count = q->first;
			q->first = i + 1;
		}
	}
	PyMem_Free(q->entries);
	q->entries = entries;
	q->size = size;
	return 0;
}

static size_t room(const struct rp_in_flight *q)
{
	/* In any order, entries that are done count as taken until they are dropped. */
	return q->size - (q->end - (q->in_order ? q->dropped : 0));
}

int rp_reserve(struct rp_in_flight *q, size_t count)
{
	int failed = 0;

	RP_BEGIN(q);
	while (!failed && room(q) < count)
		failed = grow(q);
	RP_END();
	return failed;
}

/* A slot's number and how often it has been used: a stale ticket finds nobody. */
static uint64_t slot_ticket(const struct rp_in_flight *q, size_t index)
{
	return q->base | (uint64_t)q->entries[index].generation << 24 | index;
}

uint64_t rp_record(struct rp_in_flight *q, PyObject *wr_id, PyObject *held,
		   uint64_t count, uint64_t removes)
{
	struct rp_entry *entry;
	uint64_t ticket;

	RP_BEGIN(q);
	if (q->in_order) {
		entry = at(q, q->end);
		ticket = q->base | (q->posted & UINT32_MAX);
	} else {
		ticket = slot_ticket(q, q->first - 1);
		entry = &q->entries[q->first - 1];
		q->first = entry->count;
	}
	q->end++;
	entry->wr_id = wr_id;
	entry->held = held;
	entry->count = count;
	entry->removes = removes;
	entry->state = POSTED;
	q->posted += count;
	RP_END();
	return ticket;
}

/* The entry in any order that a ticket names, while it is outstanding. */
static struct rp_entry *find(const struct rp_in_flight *q, uint64_t ticket)
{
	size_t index = ticket & 0xFFFFFF;

	if (index >= q->size || slot_ticket(q, index) != ticket ||
	    q->entries[index].state == FREE || q->entries[index].state == DONE)
		return NULL;
	return &q->entries[index];
}

/* Leave an entry in any order to rp_drop_done(). */
static void retire(struct rp_in_flight *q, struct rp_entry *entry)
{
	entry->state = DONE;
	entry->count = q->dropped;
	q->dropped = (size_t)(entry - q->entries) + 1;
	q->done++;
}

static PyObject *wr_id_of(const struct rp_entry *entry, uint64_t index)
{
	PyObject *wr_id = entry->wr_id;

	if ((PyObject *)Py_TYPE(wr_id) == rp_sent_type)
		wr_id = PyTuple_GetItem(((struct rp_sent *)wr_id)->wr_ids,
					(Py_ssize_t)index);
	return Py_XNewRef(wr_id);
}

/* A TAG_DEL is done: its receive is, too, unless a message was faster. */
static void release(struct rp_in_flight *tagged, uint64_t ticket)
{
	struct rp_entry *entry;

	RP_BEGIN(tagged);
	entry = find(tagged, ticket);
	if (entry && entry->state == POSTED)
		retire(tagged, entry);
	RP_END();
}

static PyObject *complete_in_order(struct rp_in_flight *q, uint64_t ticket)
{
	uint64_t ahead = (ticket - q->done) & UINT32_MAX;
	PyObject *wr_id = NULL;

	if (ahead >= q->posted - q->done)
		return NULL;
	q->done += ahead + 1;
	while (!wr_id && q->first != q->end) {
		struct rp_entry *entry = at(q, q->first);
		uint64_t left = entry->count - q->begun;

		if (ahead < left)
			wr_id = wr_id_of(entry, q->begun + ahead);
		if (ahead + 1 < left) {
			q->begun += ahead + 1;
			continue;
		}
		q->begun = 0;
		q->first++;
		ahead -= ahead < left ? ahead : left;
		if (entry->removes && q->tagged)
			release(q->tagged, entry->removes);
	}
	return wr_id;
}

static PyObject *complete_any(struct rp_in_flight *q, uint64_t ticket)
{
	struct rp_entry *entry = find(q, ticket);
	PyObject *wr_id;

	if (!entry)
		return NULL;
	wr_id = Py_NewRef(entry->wr_id);
	if (entry->state == EARLY)
		entry->state = MATCHED;
	else
		retire(q, entry);
	return wr_id;
}

PyObject *rp_complete(struct rp_in_flight *q, uint64_t ticket)
{
	PyObject *wr_id;

	RP_BEGIN(q);
	wr_id = q->in_order ? complete_in_order(q, ticket) :
			      complete_any(q, ticket);
	RP_END();
	return wr_id;
}

void rp_match(struct rp_in_flight *q, uint64_t ticket)
{
	struct rp_entry *entry;

	RP_BEGIN(q);
	entry = q->in_order ? NULL : find(q, ticket);
	if (entry)
		entry->state = EARLY;
	RP_END();
}

int rp_is_outstanding(struct rp_in_flight *q, uint64_t ticket)
{
	int found;

	RP_BEGIN(q);
	found = q->in_order ? ((ticket - q->done) & UINT32_MAX) <
				      q->posted - q->done :
			      find(q, ticket) != NULL;
	RP_END();
	return found;
}

static void free_slot(struct rp_in_flight *q, struct rp_entry *entry)
{
	entry->wr_id = entry->held = NULL;
	entry->state = FREE;
	entry->generation++;
	entry->count = q->first;
	q->first = (size_t)(entry - q->entries) + 1;
	q->end--;
}

/* Take out the next entry that is done; whether there was one. */
static int take_done(struct rp_in_flight *q, struct rp_entry *taken)
{
	struct rp_entry *entry;
	int there;

	RP_BEGIN(q);
	if (q->in_order) {
		there = q->dropped != q->first;
		if (there)
			*taken = *at(q, q->dropped++);
	} else {
		there = q->dropped != 0;
		if (there) {
			size_t number = q->dropped;

			entry = &q->entries[number - 1];
			*taken = *entry;
			q->dropped = entry->count;
			free_slot(q, entry);
		}
	}
	RP_END();
	return there;
}

void rp_let_go(struct rp_entry *entry)
{
	rp_unname_all(entry->held);
	Py_XDECREF(entry->held);
	Py_XDECREF(entry->wr_id);
}

void rp_drop_done(struct rp_in_flight *q)
{
	struct rp_entry entry;

	while (take_done(q, &entry))
		/* It may come here again: nothing is remembered across it. */
		rp_let_go(&entry);
	if (q->tagged)
		rp_drop_done(q->tagged);
}

void rp_unrecord(struct rp_in_flight *q, uint64_t ticket, uint64_t count,
		 struct rp_entry *taken)
{
	struct rp_entry *entry;

	taken->wr_id = taken->held = NULL;
	RP_BEGIN(q);
	if (!q->in_order) {
		entry = find(q, ticket);
		if (entry) {
			*taken = *entry;
			free_slot(q, entry);
			q->posted--;
		}
	} else if (q->end != q->first &&
		   ((ticket + count) & UINT32_MAX) == (q->posted & UINT32_MAX)) {
		entry = at(q, q->end - 1);
		q->posted -= count;
		if (entry->count > count) {
			entry->count -= count;
		} else {
			*taken = *entry;
			q->end--;
		}
	}
	RP_END();
}

/* Forget everything: the queue has been destroyed or reset. */
static void clear(struct rp_in_flight *q)
{
	RP_BEGIN(q);
	if (q->in_order) {
		q->done = q->posted;
		q->begun = 0;
		q->first = q->end;
	} else {
		for (size_t i = 0; i < q->size; i++)
			if (q->entries[i].state != FREE &&
			    q->entries[i].state != DONE)
				retire(q, &q->entries[i]);
	}
	RP_END();
	rp_drop_done(q);
}

struct rp_in_flight *rp_find_queue(PyObject *queues, uint64_t ticket)
{
	PyObject *number = PyLong_FromUnsignedLong(ticket >> 32), *found = NULL;

	if (!number) {
		PyErr_Clear();
		return NULL;
	}
#ifdef Py_GIL_DISABLED
	if (PyDict_GetItemRef(queues, number, &found) < 0)
		PyErr_Clear();
#else
	found = Py_XNewRef(PyDict_GetItemWithError(queues, number));
	if (PyErr_Occurred())
		PyErr_Clear();
#endif
	Py_DECREF(number);
	return (struct rp_in_flight *)found;
}

/* ---- the type ----------------------------------------------------------- */

static PyObject *in_flight_new(PyTypeObject *type, PyObject *args,
			       PyObject *kwargs)
{
	static uint64_t number;
	static char *names[] = { "in_order", "tagged", NULL };
	PyObject *tagged = Py_None;
	struct rp_in_flight *q;
	int in_order = 1;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pO", names, &in_order,
					 &tagged))
		return NULL;
	if (tagged != Py_None &&
	    !PyObject_TypeCheck(tagged, (PyTypeObject *)rp_in_flight_type)) {
		PyErr_SetString(PyExc_TypeError, "tagged is an InFlight");
		return NULL;
	}
	q = (struct rp_in_flight *)PyType_GenericAlloc(type, 0);
	if (!q)
		return NULL;
	q->in_order = in_order;
	if (tagged != Py_None)
		q->tagged = (struct rp_in_flight *)Py_NewRef(tagged);
	/* No two queues of a process share one. */
	q->base = __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED) << 32;
	return (PyObject *)q;
}

/* Go through the entries that are there, done or not. */
static struct rp_entry *entry_there(struct rp_in_flight *q, size_t i)
{
	struct rp_entry *entry;

	if (q->in_order)
		return q->dropped + i == q->end ? NULL : at(q, q->dropped + i);
	entry = i < q->size ? &q->entries[i] : NULL;
	return entry;
}

static int in_flight_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	struct rp_entry *entry;

	Py_VISIT(Py_TYPE(self));
	for (size_t i = 0; (entry = entry_there(q, i)); i++) {
		Py_VISIT(entry->wr_id);
		Py_VISIT(entry->held);
	}
	Py_VISIT(q->tagged);
	return 0;
}

static int in_flight_clear(PyObject *self)
{
	clear((struct rp_in_flight *)self);
	return 0;
}

static void in_flight_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	clear(q);
	PyMem_Free(q->entries);
	Py_XDECREF((PyObject *)q->tagged);
	free(self);
	Py_DECREF(type);
}

static PyObject *in_flight_clear_all(PyObject *self, PyObject *unused)
{
	(void)unused;
	in_flight_clear(self);
	Py_RETURN_NONE;
}

/* Return the entry of the oldest work request but so many, and its index there; NULL past the end. */
static struct rp_entry *outstanding(struct rp_in_flight *q, uint64_t index,
				    uint64_t *within)
{
	if (!q->in_order) {
		for (size_t i = 0; i < q->size; i++)
			if (q->entries[i].state != FREE &&
			    q->entries[i].state != DONE && !index--) {
				*within = 0;
				return &q->entries[i];
			}
		return NULL;
	}
	index += q->begun;
	for (size_t i = q->first; i != q->end; i++) {
		if (index < at(q, i)->count) {
			*within = index;
			return at(q, i);
		}
		index -= at(q, i)->count;
	}
	return NULL;
}

/* entry(index): (wr_id, what it holds) of an outstanding work request, or None. */
static PyObject *in_flight_entry(PyObject *self, PyObject *arg)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	uint64_t index = PyLong_AsUnsignedLongLong(arg), within;
	PyObject *wr_id = NULL, *held = NULL, *made;
	struct rp_entry *entry;

	if (index == (uint64_t)-1 && PyErr_Occurred())
		return NULL;
	RP_BEGIN(q);
	entry = outstanding(q, index, &within);
	if (entry) {
		wr_id = wr_id_of(entry, within);
		held = entry->held;
		if ((PyObject *)Py_TYPE(entry->wr_id) == rp_sent_type)
			held = PyTuple_GetItem(
				((struct rp_sent *)entry->wr_id)->held,
				(Py_ssize_t)within);
		Py_XINCREF(held);
	}
	RP_END();
	if (!wr_id)
		Py_RETURN_NONE;
	made = PyTuple_Pack(2, wr_id, held ? held : Py_None);
	Py_DECREF(wr_id);
	Py_XDECREF(held);
	return made;
}

/* peek(ticket): the caller's wr_id of an outstanding work request, or None. */
static PyObject *in_flight_peek(PyObject *self, PyObject *arg)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	uint64_t ticket = PyLong_AsUnsignedLongLong(arg), within = 0;
	struct rp_entry *entry;
	PyObject *wr_id = NULL;

	if (ticket == (uint64_t)-1 && PyErr_Occurred())
		return NULL;
	RP_BEGIN(q);
	entry = q->in_order ? outstanding(q, (ticket - q->done) & UINT32_MAX,
					  &within) : find(q, ticket);
	if (entry)
		wr_id = wr_id_of(entry, within);
	RP_END();
	return wr_id ? wr_id : Py_NewRef(Py_None);
}

static PyObject *in_flight_outstanding(PyObject *self, void *unused)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	(void)unused;
	return PyLong_FromUnsignedLongLong(q->posted - q->done);
}

static PyObject *in_flight_number(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(
		((struct rp_in_flight *)self)->base >> 32);
}

static PyMethodDef in_flight_methods[] = {
	{ "peek", in_flight_peek, METH_O, NULL },
	{ "entry", in_flight_entry, METH_O, NULL },
	{ "clear", in_flight_clear_all, METH_NOARGS,
	  "Forget everything: the queue has been destroyed or reset." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef in_flight_getset[] = {
	{ "outstanding", in_flight_outstanding, NULL, NULL, NULL },
	{ "number", in_flight_number, NULL, NULL, NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot in_flight_slots[] = {
	{ Py_tp_new, in_flight_new },
	{ Py_tp_dealloc, in_flight_dealloc },
	{ Py_tp_traverse, in_flight_traverse },
	{ Py_tp_clear, in_flight_clear },
	{ Py_tp_methods, in_flight_methods },
	{ Py_tp_getset, in_flight_getset },
	{ 0, NULL },
};

static PyType_Spec in_flight_spec = {
	.name = "rdmapost._verbs.InFlight",
	.basicsize = sizeof(struct rp_in_flight),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = in_flight_slots,
};

/* ---- a prepared list in flight ------------------------------------------ */

PyObject *rp_make_sent(PyObject *wr_ids, PyObject *held)
{
	struct rp_sent *sent = (struct rp_sent *)PyType_GenericAlloc(
		(PyTypeObject *)rp_sent_type, 0);

	if (!sent)
		return NULL;
	sent->count = (uint64_t)PyTuple_Size(wr_ids);
	sent->wr_ids = wr_ids;
	sent->held = held;
	rp_name_all(held);
	return (PyObject *)sent;
}

static int sent_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct rp_sent *)self)->wr_ids);
	Py_VISIT(((struct rp_sent *)self)->held);
	return 0;
}

static void sent_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct rp_sent *sent = (struct rp_sent *)self;

	PyObject_GC_UnTrack(self);
	rp_unname_all(sent->held);
	Py_XDECREF(sent->wr_ids);
	Py_XDECREF(sent->held);
	PyObject_GC_Del(self);
	Py_DECREF(type);
}

static PyType_Slot sent_slots[] = {
	{ Py_tp_dealloc, sent_dealloc },
	{ Py_tp_traverse, sent_traverse },
	{ 0, NULL },
};

static PyType_Spec sent_spec = {
	.name = "rdmapost._verbs.Sent",
	.basicsize = sizeof(struct rp_sent),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
		 Py_TPFLAGS_DISALLOW_INSTANTIATION,
	.slots = sent_slots,
};

int rp_add_in_flight(PyObject *module)
{
	rp_in_flight_type = PyType_FromSpec(&in_flight_spec); /* held for ever */
	rp_sent_type = PyType_FromSpec(&sent_spec);
	return rp_in_flight_type && rp_sent_type ?
		       PyModule_AddObjectRef(module, "InFlight",
					     rp_in_flight_type) : -1;
}

/* Work requests posted and not known to be done (inflight.h). */
#include "posting/post.h"

#include <structmember.h>

PyObject *rp_in_flight_type, *rp_sent_type;

/* ---- what an entry holds ------------------------------------------------ */

/* Work requests hold few types; None and bytes are not handles. */
static inline int is_handle(PyObject *object)
{
	return rp_has_type(object, rp_known.mr) || rp_has_type(object, rp_known.ah) ||
	       (object != Py_None && !PyBytes_CheckExact(object) && rp_is_handle(object));
}

/* Name or unname a handle, or those in a tuple; returns the first that is not open, or NULL. */
static PyObject *each(PyObject *held, int unname)
{
	int many = held && PyTuple_CheckExact(held);
	Py_ssize_t count = many ? PyTuple_Size(held) : held != NULL;
	PyObject *closed = NULL;

	for (Py_ssize_t i = count; i--;) {
		PyObject *one = many ? PyTuple_GetItem(held, i) : held;
		PyObject *found = NULL;

		if (PyTuple_CheckExact(one)) {
			found = each(one, unname);
		} else if (is_handle(one) && unname) {
			rp_unname((struct rp_handle *)one);
		} else if (is_handle(one)) {
			rp_name((struct rp_handle *)one);
			found = rp_is_open((struct rp_handle *)one) ? NULL : one;
		}
		closed = found ? found : closed;
	}
	return closed;
}

PyObject *rp_name_all(PyObject *held)
{
	return each(held, 0);
}

void rp_unname_all(PyObject *held)
{
	each(held, 1);
}

/* ---- the entries -------------------------------------------------------- */

static struct rp_entry *at(const struct rp_in_flight *q, uint64_t index)
{
	return &q->entries[index & (q->size - 1)];
}

static int grow_once(struct rp_in_flight *q)
{
	size_t size = q->size ? 2 * q->size : 16;
	struct rp_entry *entries = PyMem_Malloc(size * sizeof(*entries));

	if (!entries) {
		PyErr_NoMemory();
		return -1;
	}
	for (size_t i = q->dropped; q->in_order && i != q->end; i++)
		entries[i & (size - 1)] = *at(q, i);
	if (!q->in_order) {
		if (q->size)
			memcpy(entries, q->entries, q->size * sizeof(*entries));
		for (size_t i = size; i-- > q->size;) {
			entries[i] = (struct rp_entry){ .count = q->free };
			q->free = (uint32_t)i + 1;
		}
	}
	PyMem_Free(q->entries);
	q->entries = entries;
	q->size = size;
	return 0;
}

int rp_grow(struct rp_in_flight *q, size_t count)
{
	int failed = 0;

	RP_BEGIN(q);
	while (!failed && q->size - (q->end - q->dropped) < count)
		failed = grow_once(q);
	RP_END();
	return failed;
}

/*
 * The low half of a slot's ticket, never 0: 1 + its index, and how often it has been used, so that
 * a stale ticket finds nothing.
 */
static uint32_t end_of_ticket(const struct rp_in_flight *q, size_t index)
{
	return (uint32_t)q->entries[index].generation << 24 | (uint32_t)(index + 1);
}

struct rp_entry *rp_take_slot(struct rp_in_flight *q, uint64_t *ticket)
{
	struct rp_entry *entry = &q->entries[q->free - 1];

	*ticket = q->base | end_of_ticket(q, q->free - 1);
	q->free = entry->count;
	q->end++;
	return entry;
}

static int is_there(const struct rp_entry *entry)
{
	return entry->state != RP_FREE && entry->state != RP_DONE;
}

/* In a queue without order, the outstanding entry that a ticket names. */
static struct rp_entry *find(const struct rp_in_flight *q, uint64_t ticket)
{
	size_t index = (size_t)(ticket & 0xFFFFFF) - 1;

	return index < q->size && end_of_ticket(q, index) == (uint32_t)ticket &&
	       is_there(&q->entries[index]) ? &q->entries[index] : NULL;
}

/* In such a queue, leave an entry to rp_drop_done(). */
static void retire(struct rp_in_flight *q, struct rp_entry *entry)
{
	entry->state = RP_DONE;
	entry->count = q->retired;
	q->retired = (uint32_t)(entry - q->entries) + 1;
	q->done++;
}

static PyObject *wr_id_of(const struct rp_entry *entry, uint64_t index)
{
	PyObject *wr_id = entry->wr_id;

	if ((PyObject *)Py_TYPE(wr_id) == rp_sent_type)
		wr_id = PyTuple_GetItem(((struct rp_sent *)wr_id)->wr_ids, (Py_ssize_t)index);
	return Py_XNewRef(wr_id);
}

/* A TAG_DEL is done, and so is its receive, unless a message matched first. */
static void release(struct rp_in_flight *tagged, uint32_t ticket, uint64_t serial)
{
	struct rp_entry *entry;

	RP_BEGIN(tagged);
	entry = find(tagged, ticket);
	if (entry && entry->serial == serial && entry->state == RP_POSTED)
		retire(tagged, entry);
	RP_END();
}

/*
 * Note a bind's outcome. An error is the last entry's; whether an unsignaled one before it was
 * carried out is unknown.
 */
static void note_bind(struct rp_entry *entry, int last, int status)
{
	if (status == IBV_WC_SUCCESS)
		entry->state = entry->state == RP_BIND ? RP_BOUND : RP_UNBOUND;
	else if (last && (status == IBV_WC_MW_BIND_ERR || status == IBV_WC_LOC_QP_OP_ERR ||
			  status == IBV_WC_LOC_PROT_ERR))
		entry->state = RP_POSTED;
}

static PyObject *complete_in_order(struct rp_in_flight *q, uint64_t ticket, int status)
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
		if (entry->state >= RP_BIND)
			note_bind(entry, wr_id != NULL, status);
		/* An error is the last entry's, which has removed nothing. */
		if (entry->removes && q->tagged && (!wr_id || status == IBV_WC_SUCCESS))
			release(q->tagged, entry->removes, entry->serial);
	}
	return wr_id;
}

static PyObject *complete_any(struct rp_in_flight *q, uint64_t ticket)
{
	struct rp_entry *entry = find(q, ticket);
	PyObject *wr_id = entry ? Py_NewRef(entry->wr_id) : NULL;

	if (entry && entry->state == RP_EARLY)
		entry->state = RP_MATCHED;
	else if (entry)
		retire(q, entry);
	return wr_id;
}

PyObject *rp_complete(struct rp_in_flight *q, uint64_t ticket, int status)
{
	PyObject *wr_id;

	RP_BEGIN(q);
	wr_id = q->in_order ? complete_in_order(q, ticket, status) : complete_any(q, ticket);
	RP_END();
	return wr_id;
}

void rp_match(struct rp_in_flight *q, uint64_t ticket)
{
	struct rp_entry *entry;

	RP_BEGIN(q);
	entry = q->in_order ? NULL : find(q, ticket);
	if (entry)
		entry->state = RP_EARLY;
	RP_END();
}

int rp_is_outstanding(struct rp_in_flight *q, uint64_t ticket, uint64_t serial)
{
	const struct rp_entry *entry;
	int found;

	RP_BEGIN(q);
	entry = find(q, ticket);
	found = entry && entry->serial == serial;
	RP_END();
	return found;
}

static void free_slot(struct rp_in_flight *q, struct rp_entry *entry)
{
	*entry = (struct rp_entry){ .count = q->free,
				    .generation = (unsigned char)(entry->generation + 1) };
	q->free = (uint32_t)(entry - q->entries) + 1;
	q->end--;
}

/* Take out the next entry that is done; whether there was one. */
static int take_done(struct rp_in_flight *q, struct rp_entry *taken)
{
	int there = 1;

	RP_BEGIN(q);
	if (q->dropped != q->first) {
		*taken = *at(q, q->dropped++);
	} else if (q->retired) {
		struct rp_entry *entry = &q->entries[q->retired - 1];

		*taken = *entry;
		q->retired = entry->count;
		free_slot(q, entry);
	} else {
		there = 0;
	}
	RP_END();
	return there;
}

/* May run any Python code. */
static void let_go(struct rp_in_flight *q, struct rp_entry *entry)
{
	if (entry->state >= RP_BIND) {
		PyObject *mr = PyTuple_GetItem(entry->held, 1);

		/* If the outcome is unknown, keep what was bound before and hold both. */
		if (entry->state != RP_UNBIND)
			rp_bind((struct rp_handle *)PyTuple_GetItem(entry->held, 0),
				entry->state == RP_UNBOUND ? NULL : (struct rp_handle *)mr,
				entry->state != RP_BIND, &q->binder, entry->serial);
	}
	rp_unname_all(entry->held);
	Py_XDECREF(entry->held);
	Py_XDECREF(entry->wr_id);
}

void rp_drop_all_done(struct rp_in_flight *q)
{
	struct rp_entry entry;

	while (take_done(q, &entry))
		/* It may recurse, so keep no state across it. */
		let_go(q, &entry);
	if (q->tagged)
		rp_drop_done(q->tagged);
}

void rp_unrecord(struct rp_in_flight *q, uint64_t ticket, uint64_t count, struct rp_entry *taken)
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
			entry->count -= (uint32_t)count;
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
			if (is_there(&q->entries[i]))
				retire(q, &q->entries[i]);
	}
	RP_END();
	rp_drop_done(q);
}

struct rp_in_flight *rp_find_queue(PyObject *queues, uint64_t ticket)
{
	PyObject *number = PyLong_FromUnsignedLong(ticket >> 32), *found = NULL, *queue;
	Py_ssize_t at = 0;

	if (number) {
		found = rp_dict_get(queues, number);
		Py_DECREF(number);
		return (struct rp_in_flight *)found;
	}
	/* No memory for an int is no reason to lose a completion. */
	PyErr_Clear();
	RP_BEGIN(queues);
	while (!found && PyDict_Next(queues, &at, NULL, &queue))
		if (((struct rp_in_flight *)queue)->base >> 32 == ticket >> 32)
			found = Py_NewRef(queue);
	RP_END();
	return (struct rp_in_flight *)found;
}

/* ---- the type ----------------------------------------------------------- */

static PyObject *in_flight_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static uint64_t number;
	static char *names[] = { "in_order", "tagged", NULL };
	PyObject *tagged = Py_None;
	struct rp_in_flight *q;
	int in_order = 1;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pO", names, &in_order, &tagged))
		return NULL;
	if (tagged != Py_None && !PyObject_TypeCheck(tagged, (PyTypeObject *)rp_in_flight_type)) {
		PyErr_SetString(PyExc_TypeError, "tagged is an InFlight");
		return NULL;
	}
	q = (struct rp_in_flight *)PyType_GenericAlloc(type, 0);
	if (!q)
		return NULL;
	q->in_order = in_order;
	q->binder.queue = (PyObject *)q;
	if (tagged != Py_None)
		q->tagged = (struct rp_in_flight *)Py_NewRef(tagged);
	/* No two queues of a process share one. */
	q->base = __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED) << 32;
	return (PyObject *)q;
}

static int in_flight_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	Py_VISIT(Py_TYPE(self));
	for (size_t i = q->dropped; i != (q->in_order ? q->end : q->size); i++) {
		Py_VISIT(at(q, i)->wr_id);
		Py_VISIT(at(q, i)->held);
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
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	PyObject_GC_UnTrack(self);
	clear(q);
	PyMem_Free(q->entries);
	Py_XDECREF((PyObject *)q->tagged);
	rp_free(self);
}

static PyObject *in_flight_clear_all(PyObject *self, PyObject *unused)
{
	(void)unused;
	clear((struct rp_in_flight *)self);
	Py_RETURN_NONE;
}

/* Return the entry of the index-th oldest work request, and its index there; NULL past the end. */
static struct rp_entry *outstanding(struct rp_in_flight *q, uint64_t index, uint64_t *within)
{
	if (!q->in_order) {
		for (size_t i = 0; i < q->size; i++)
			if (is_there(&q->entries[i]) && !index--) {
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
			held = PyTuple_GetItem(((struct rp_sent *)entry->wr_id)->held,
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
	return PyLong_FromUnsignedLongLong(((struct rp_in_flight *)self)->base >> 32);
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

/* ---- a prepared list in flight ------------------------------------------ */

PyObject *rp_make_sent(PyObject *wr_ids, PyObject *held)
{
	struct rp_sent *sent = (struct rp_sent *)PyType_GenericAlloc(
		(PyTypeObject *)rp_sent_type, 0);

	if (!sent)
		return NULL;
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
	struct rp_sent *sent = (struct rp_sent *)self;

	PyObject_GC_UnTrack(self);
	rp_unname_all(sent->held);
	Py_XDECREF(sent->wr_ids);
	Py_XDECREF(sent->held);
	rp_free(self);
}

static PyType_Slot sent_slots[] = {
	{ Py_tp_dealloc, sent_dealloc },
	{ Py_tp_traverse, sent_traverse },
	{ 0, NULL },
};

int rp_add_in_flight(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Sent", sizeof(struct rp_sent),
			   Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, sent_slots, &rp_sent_type) ||
	       rp_add_type(module, "rdmapost._verbs.InFlight", sizeof(struct rp_in_flight),
			   Py_TPFLAGS_HAVE_GC, in_flight_slots, &rp_in_flight_type) ? -1 : 0;
}
